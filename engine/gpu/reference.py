"""The operators of `engine/gpu/ops.py` in plain torch: for tests, on a device without Triton.

Slow and easy to read. Nothing here looks at a slot that the contract does not name, so a pool poisoned with NaN changes
no result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import xxhash

from engine.fp8 import quantized, scaled


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, normed: torch.Tensor
) -> None:
    if update is not None:
        hidden += update
    normed.copy_(F.rms_norm(hidden.float(), hidden.shape[-1:], weight.float(), epsilon))


def silu_and_multiply(gate_up: torch.Tensor, activated: torch.Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated.copy_(F.silu(gate) * up)


def multiply_few_rows(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    partial: torch.Tensor,  # noqa: ARG001 - kernels use it
    counters: torch.Tensor,  # noqa: ARG001 - kernels use it
    outputs: torch.Tensor,
) -> None:
    outputs.copy_(F.linear(inputs.float(), weight.float()))


def rope_and_cache(
    heads: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    scales: torch.Tensor | None = None,
) -> None:
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    num_rotated = heads.shape[1] - num_kv_heads
    cos, sin = cosine[positions.long()][:, None], sine[positions.long()][:, None]
    first, second = heads[:, :num_rotated].float().chunk(2, dim=-1)
    heads[:, :num_rotated] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)
    blocks, places = slots.long() // block_size, slots.long() % block_size
    cached = (heads[:, num_rotated - num_kv_heads : num_rotated], heads[:, num_rotated:])
    for kind, rows in enumerate(cached):
        if scales is None:
            pool[blocks, layer, kind, :, places] = rows.to(pool.dtype)
            continue
        codes, scales[blocks, layer, kind, :, places] = quantized(rows)
        # torch indexes no elements of 8 bits in floating point
        pool.view(torch.uint8)[blocks, layer, kind, :, places] = codes.view(torch.uint8)


def decode_attention(
    heads: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_row: torch.Tensor,
    first_block: torch.Tensor,
    num_positions: torch.Tensor,
    partial: torch.Tensor,  # noqa: ARG001 - kernels use it
    attended: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    for row, first, end in zip(first_row.tolist(), first_block.tolist(), num_positions.tolist(), strict=True):
        _attend(heads, pool, layer, block_ids[first:], row, end - 1, 1, attended, scales)


def expand_kv(
    pool: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_head: int,
    expanded: torch.Tensor,
) -> None:
    heads = slice(first_head, first_head + expanded.shape[3])
    # torch indexes no elements of 8 bits in floating point
    codes = pool.view(torch.uint8)[block_ids.long(), layer, :, heads].view(pool.dtype)
    expanded[:, 0] = codes.float() * scales[block_ids.long(), layer, :, heads, :, None]


def prefill_attention(
    heads: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_row: torch.Tensor,
    first_block: torch.Tensor,
    start: torch.Tensor,
    num_tokens: torch.Tensor,
    tile_chunk: torch.Tensor,  # noqa: ARG001 - kernels use tiles
    tile_first: torch.Tensor,  # noqa: ARG001
    attended: torch.Tensor,
) -> None:
    chunks = torch.stack((first_row, first_block, start, num_tokens), 1).tolist()
    for row, first, begin, count in chunks:
        if count:  # else it is padding
            _attend(heads, pool, layer, block_ids[first:], row, begin, count, attended, None)


def _attend(
    heads: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,  # the sequence's, and others behind them
    row: int,
    start: int,
    num_tokens: int,
    attended: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """Causal attention of rows [row, row + num_tokens), which are the positions from `start` on."""
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    num_heads, end = heads.shape[1] - 2 * num_kv_heads, start + num_tokens
    blocks = block_ids[: -(-end // block_size)].long()
    codes = pool if scales is None else pool.view(torch.uint8)
    found = codes[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]
    cached = found.view(pool.dtype).float()  # [2, Hkv, end, D]
    if scales is not None:
        cached *= scales[blocks, layer].permute(1, 2, 0, 3).flatten(2, 3)[:, :, :end, None]
    query = heads[row : row + num_tokens, :num_heads].float().transpose(0, 1)  # [Hq, n, D]
    positions = torch.arange(start, end, device=heads.device)
    seen = positions[:, None] >= torch.arange(end, device=heads.device)
    keys, values = cached.repeat_interleave(num_heads // num_kv_heads, dim=1)
    result = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=seen)[0]
    attended[row : row + num_tokens] = result.transpose(0, 1).to(attended.dtype)


def block_digests(
    memory: torch.Tensor,
    blocks: torch.Tensor,
    sums: torch.Tensor,  # noqa: ARG001 - kernels use it
    digests: torch.Tensor,
) -> None:
    assert memory.shape[1] >= 248  # shorter and odd lengths are for xxhash alone, not for the kernel
    assert memory.shape[1] % 8 == 0
    for index, block in enumerate(blocks.tolist()):
        digest = xxhash.xxh3_64_digest(memory[block].numpy().tobytes())
        digests[index] = int.from_bytes(digest, "big", signed=True)


def quantize_rows(inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    codes[:], scales[:] = quantized(inputs)


def scale_products(
    products: torch.Tensor,
    token_scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: torch.Tensor,
) -> None:
    outputs.copy_(scaled(products, token_scales, row_scales, bias))


REFERENCES: dict[str, Callable[..., None]] = {
    "add_rms_norm": add_rms_norm,
    "silu_and_multiply": silu_and_multiply,
    "multiply_few_rows": multiply_few_rows,
    "rope_and_cache": rope_and_cache,
    "decode_attention": decode_attention,
    "expand_kv": expand_kv,
    "prefill_attention": prefill_attention,
    "block_digests": block_digests,
    "quantize_rows": quantize_rows,
    "scale_products": scale_products,
}
