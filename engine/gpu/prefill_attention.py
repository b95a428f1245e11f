"""The kernel of `prefill_attention`: a tile of a chunk's tokens attends to the pool, which has the chunk's keys too.

    tile of 64 tokens, the last 2 full; P positions in one tile of the context

      position 0                          start of the tile's tokens
      |  P  |  P  |  P  |  P  | ...  |  P  |  P  |  P  |
      '------ every token sees all: no mask -----'-----'  the mask of causality

One program takes one tile of tokens and one or two query heads of a KV head: 64 or 128 rows of the products, so that a
tile of keys serves both. In float32, four programs share a tile. Programs of late tiles have most to do, and start
first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from engine.gpu.attention_tiles import (
    INTERPRETED,
    blocks_of,
    padded,
    pool_strides,
    products,
    slot_offsets,
    softmax_scale,
)
from engine.gpu.tile_sizes import PREFILL_TILE_TOKENS

SHARED_BYTES = 163_840  # that a program takes at most with all its stages


@triton.jit
def _attend_tile(
    state,
    query,
    keys,
    stride_kind,
    offsets,
    loaded,
    visible,
    scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The online softmax: add one tile of positions to (highest score, sum of weights, sum of weighted values)."""
    highest, weight_sum, sum_of_values = state
    if MASKED:
        key = tl.load(keys + offsets[:, None], mask=loaded, other=0.0)
        value = tl.load(keys + stride_kind + offsets[:, None], mask=loaded, other=0.0)
    else:
        key = tl.load(keys + offsets[:, None])
        value = tl.load(keys + stride_kind + offsets[:, None])
    rows: tl.constexpr = query.shape[0]
    scores = products(query, tl.trans(key), tl.zeros([rows, key.shape[0]], tl.float32), UPCAST)
    if CAUSAL:
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    decay = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    weight_sum = weight_sum * decay + tl.sum(weights, 1)
    sum_of_values = products(weights.to(query.dtype), value, sum_of_values * decay[:, None], UPCAST)
    return new_highest, weight_sum, sum_of_values


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=[
        "block_ids",
        "first_row",
        "first_block",
        "start",
        "num_tokens",
        "tile_chunk",
        "tile_first",
    ],
)
def prefill_attention_kernel(
    heads,
    pool,
    block_ids,
    first_row,
    first_block,
    start,
    num_tokens,
    tile_chunk,
    tile_first,
    attended,
    layer,
    scale,
    stride_token,
    stride_attended,
    stride_block,
    stride_layer,
    stride_kind,
    stride_kv_head,
    stride_place,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    UNMASKED: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    first_head = tl.program_id(0) * HEADS
    part = tl.program_id(1)  # the first tiles attend to most positions (engine/gpu/step_arrays.py)
    chunk = tl.load(tile_chunk + part // PARTS)
    if chunk < 0:
        return
    first_token = tl.load(tile_first + part // PARTS) + part % PARTS * TOKENS
    chunk_tokens = tl.load(num_tokens + chunk)
    if first_token >= chunk_tokens:
        return
    chunk_start = tl.load(start + chunk)
    table = block_ids + tl.load(first_block + chunk)

    # Row r is token r % TOKENS of the tile and head r // TOKENS of the program.
    row = tl.arange(0, HEADS * TOKENS)
    token = first_token + row % TOKENS
    head = first_head + row // TOKENS
    element = tl.arange(0, D_PADDED)
    exists = (token < chunk_tokens)[:, None] & (element < D)[None, :]
    step_row = (tl.load(first_row + chunk) + token).to(tl.int64)
    query = tl.load(heads + (step_row * stride_token + head * D)[:, None] + element[None, :], mask=exists, other=0.0)

    kv_head = (first_head // G).to(tl.int64)
    keys = pool + layer.to(tl.int64) * stride_layer + kv_head * stride_kv_head + element[None, :]
    end = chunk_start + tl.minimum(first_token + TOKENS, chunk_tokens)  # behind the tile's last position
    state = (
        tl.full([HEADS * TOKENS], float("-inf"), tl.float32),
        tl.zeros([HEADS * TOKENS], tl.float32),
        tl.zeros([HEADS * TOKENS, D_PADDED], tl.float32),
    )
    inside = (element < D)[None, :]
    positions = tl.arange(0, TILE)
    blocks = blocks_of(table, positions, end, BLOCK_SIZE)
    masked_from = 0
    if UNMASKED:
        masked_from = (chunk_start + first_token + 1) // TILE * TILE
        for _ in tl.range(0, masked_from, TILE):
            offsets = slot_offsets(blocks, positions, stride_block, stride_place, BLOCK_SIZE)
            positions += TILE
            blocks = blocks_of(table, positions, end, BLOCK_SIZE)
            state = _attend_tile(
                state, query, keys, stride_kind, offsets, inside, inside, scale, False, D < D_PADDED, UPCAST
            )
    for _ in tl.range(masked_from, end, TILE, num_stages=MASKED_STAGES):
        seen = positions < end
        offsets = slot_offsets(blocks, positions, stride_block, stride_place, BLOCK_SIZE)
        visible = positions[None, :] <= (chunk_start + token)[:, None]
        state = _attend_tile(
            state, query, keys, stride_kind, offsets, seen[:, None] & inside, visible, scale, True, True, UPCAST
        )
        positions += TILE
        blocks = blocks_of(table, positions, end, BLOCK_SIZE)
    _highest, weight_sum, sum_of_values = state
    target = attended + (step_row * stride_attended + head * D)[:, None] + element[None, :]
    tl.store(target, (sum_of_values / weight_sum[:, None]).to(attended.dtype.element_ty), mask=exists)


@functools.cache
def has_small_shared_memory(device: torch.device) -> bool:
    """Whether a program has 100 KB, as on sm_86, sm_89 and sm_120, and not 160 KB or more."""
    if device.type != "cuda":
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the field
    return int(properties.shared_memory_per_block_optin) < SHARED_BYTES


def shape_of(head_dim: int, group: int, element_size: int, small_shared_memory: bool = False) -> dict[str, int]:
    """Tokens and heads of a program, positions of a tile of the context, warps and stages of loads.

    The results and the scores of a program stay in registers, and a spill costs more than a larger tile gains. The
    matrix units of Hopper take 64 rows for 4 warps. They have no float32, so 16 rows of float32 are as good as more.
    With two loops, the compiler keeps the query of float32 in registers, and spills.
    With three stages, the loads of a tile have a whole tile's time. With two, they are awaited as soon as they start.
    """
    if element_size == 4:
        return {
            "TOKENS": 16,
            "HEADS": 1,
            "TILE": 16,
            "UNMASKED": False,
            "MASKED_STAGES": 2,
            "num_warps": 4,
            "num_stages": 2,
        }
    heads = 2 if group % 2 == 0 else 1
    tile = 32 if head_dim > 128 else 64 * heads
    if small_shared_memory:  # `num_stages` tiles of keys and values lie there
        tile = min(tile, 16 * 512 // padded(head_dim, 16))
    return {
        "TOKENS": PREFILL_TILE_TOKENS,
        "HEADS": heads,
        "TILE": tile,
        "UNMASKED": True,
        "MASKED_STAGES": 1,
        "num_warps": 8 if head_dim > 128 else 4 * heads,
        "num_stages": 3,
    }


def prefill_attention(
    heads: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_row: torch.Tensor,
    first_block: torch.Tensor,
    start: torch.Tensor,
    num_tokens: torch.Tensor,
    tile_chunk: torch.Tensor,
    tile_first: torch.Tensor,
    attended: torch.Tensor,
) -> None:
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    num_heads, head_dim = heads.shape[1] - 2 * num_kv_heads, heads.shape[2]
    if len(tile_chunk) == 0:
        return
    assert heads.stride()[1:] == attended.stride()[1:] == (head_dim, 1)
    group = num_heads // num_kv_heads
    small = has_small_shared_memory(heads.device)
    shape = shape_of(head_dim, group, heads.element_size(), small)
    parts = PREFILL_TILE_TOKENS // shape["TOKENS"]
    prefill_attention_kernel[num_heads // shape["HEADS"], len(tile_chunk) * parts](
        heads,
        pool,
        block_ids,
        first_row,
        first_block,
        start,
        num_tokens,
        tile_chunk,
        tile_first,
        attended,
        layer,
        softmax_scale(head_dim),
        heads.stride(0),
        attended.stride(0),
        *pool_strides(pool),
        G=group,
        D=head_dim,
        D_PADDED=padded(head_dim, 16),
        BLOCK_SIZE=block_size,
        PARTS=parts,
        UPCAST=INTERPRETED,
        **shape,
    )
