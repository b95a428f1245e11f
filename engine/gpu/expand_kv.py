"""The kernel of `expand_kv`: blocks of a pool of 8 bits become blocks in the dtype of the heads, for one layer.

A tile of codes that a product of many rows reads must lie in shared memory in the dtype of the product. So attention of
prompts would convert each tile between two products, once for every 64 tokens. Here each code is converted once for all
tokens of the step. Bound by memory: a program moves ROWS rows of keys or values of one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.attention_tiles import padded, pool_strides, scale_strides

_TILE = 4096  # values of a program: 32 for each thread


@triton.jit(do_not_specialize=["layer", "first_head"], do_not_specialize_on_alignment=["block_ids"])
def expand_kv_kernel(
    pool,
    scales,
    block_ids,
    expanded,
    layer,
    first_head,
    stride_block,
    stride_layer,
    stride_kind,
    stride_kv_head,
    stride_place,
    scales_block,
    scales_layer,
    scales_kind,
    scales_kv_head,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + entry).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # of the entry's [2, NUM_HEADS, BLOCK_SIZE]
    exists = row < 2 * NUM_HEADS * BLOCK_SIZE
    kind, head = row // BLOCK_SIZE // NUM_HEADS, first_head + row // BLOCK_SIZE % NUM_HEADS
    place = row % BLOCK_SIZE
    element = tl.arange(0, D_PADDED)
    inside = exists[:, None] & (element < D)[None, :]

    source = pool + block * stride_block + layer.to(tl.int64) * stride_layer
    source += (kind * stride_kind + head * stride_kv_head + place * stride_place)[:, None]
    scale = scales + block * scales_block + layer.to(tl.int64) * scales_layer
    scale = tl.load(scale + kind * scales_kind + head * scales_kv_head + place, mask=exists, other=0.0)
    values = tl.load(source + element[None, :], mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    target = expanded + entry * (2 * NUM_HEADS * BLOCK_SIZE * D) + row[:, None] * D + element[None, :]
    tl.store(target, values.to(expanded.dtype.element_ty), mask=inside)


def expand_kv(
    pool: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_head: int,
    expanded: torch.Tensor,
) -> None:
    num_heads, block_size, head_dim = expanded.shape[3:]
    if len(block_ids) == 0:
        return
    assert expanded.is_contiguous()
    rows = _TILE // padded(head_dim, 16)
    expand_kv_kernel[len(block_ids), triton.cdiv(2 * num_heads * block_size, rows)](
        pool,
        scales,
        block_ids,
        expanded,
        layer,
        first_head,
        *pool_strides(pool),
        *scale_strides(scales),
        NUM_HEADS=num_heads,
        D=head_dim,
        D_PADDED=padded(head_dim, 16),
        BLOCK_SIZE=block_size,
        ROWS=rows,
        num_warps=4,
    )
