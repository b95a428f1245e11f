"""The kernels of `decode_attention`: several programs share a context, and a second kernel joins their results.

    C chunks of one token    Hq query heads    Hkv KV heads    G = Hq / Hkv    D head size    S splits

A program takes the G query heads of one KV head and one split: a range of the chunk's context. So keys and values are
read once. The ranges are whole tiles; a context with few tiles uses fewer than S splits.

    context of 11 tiles, S = 4:   | 0 1 | 2 3 4 | 5 6 7 | 8 9 10 |

`partial` is scratch of [C, Hq, S] rows: first the rows' sums of weighted values (D each), then each row's highest score
and its sum of weights. With S = 1 the first kernel writes the result itself.

In a pool with scales, a key's scale is a factor of its scores, and a value's scale is a factor of its weights. Two
codes are read as one integer, because the way to the matrix units transposes elements of 16 bits, not of 8. So each
product has two parts: the elements of even places, and those of odd places. The parts are float16, which has every
code. The query and the scales of values are divided by their largest sizes to fit: what is 2^24 times smaller is lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.attention_tiles import (
    INTERPRETED,
    blocks_of,
    padded,
    pool_strides,
    products,
    scale_strides,
    slot_offsets,
    softmax_scale,
)
from engine.gpu.early_launch import early_launch, follow

MAX_SPLITS = 64  # the join is compiled for as many, once
PROGRAMS_PER_PROCESSOR = 8
"""Contexts differ in length. Several programs for each place on a processor even them out."""
POSITIONS_PER_SPLIT = 128
"""A shorter split spends more time on its start, its scratch and the join than on the context."""


def num_decode_splits(batch: int, num_kv_heads: int, max_context: int, num_processors: int) -> int:
    """The number of programs that share a context: enough to fill the device, and no more than a context can use."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // (batch * num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, max_context // POSITIONS_PER_SPLIT))


@triton.jit
def _num_tiles(num_positions, TILE: tl.constexpr):
    return (num_positions + TILE - 1) // TILE


@triton.jit
def _num_used_splits(num_tiles, num_splits, TILE: tl.constexpr, POSITIONS_PER_SPLIT: tl.constexpr):
    """The splits of a context that have tiles."""
    return tl.minimum(num_splits, tl.maximum(1, num_tiles * TILE // POSITIONS_PER_SPLIT))


@triton.jit
def _halves(pairs, UPCAST: tl.constexpr):
    """The values of two codes (e4m3) in each int16: the low and the high byte's. # int16 -> float16 twice"""
    if UPCAST:  # the interpreter has no assembler; a code shifted into float16 is its value / 2^8
        bits = pairs << 8
        low = ((bits & -0x8000) | ((bits >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256
        high = ((pairs & -0x8000) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256
    else:  # two pairs at a time, which share a register: sort their bytes, then convert two codes at once
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def _sizes(query, other_query):
    """The power of two at or below each row's largest size: a division by it is exact. # float32 [G]"""
    largest = tl.maximum(tl.max(tl.abs(query), 1), tl.max(tl.abs(other_query), 1))
    bits = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["layer", "num_splits"],
    do_not_specialize_on_alignment=["block_ids", "first_row", "first_block", "num_positions"],
)
def decode_attention_kernel(
    heads,
    pool,  # int16 if it has scales; the strides count in its elements
    scales,
    block_ids,
    first_row,
    first_block,
    num_positions,
    sums,  # float32 [C, Hq, S, D]
    softmaxes,  # float32 [C, Hq, S, 2] highest score and sum of weights
    attended,
    layer,
    num_splits,
    scale,
    stride_token,
    stride_attended,
    stride_block,
    stride_layer,
    stride_kind,
    stride_kv_head,
    stride_place: tl.constexpr,  # so that the compiler knows the alignment of 40 integers
    scales_block,
    scales_layer,
    scales_kind,
    scales_kv_head,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,  # of a head: 2 with scales
    PART_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS_PER_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EARLY: tl.constexpr,
):
    kv_head, split, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(num_positions + chunk)
    num_tiles = _num_tiles(context, TILE)
    used_splits = _num_used_splits(num_tiles, num_splits, TILE, POSITIONS_PER_SPLIT)
    if split >= used_splits:
        return
    first_tile = split * num_tiles // used_splits
    last_tile = (split + 1) * num_tiles // used_splits

    row = tl.load(first_row + chunk).to(tl.int64)
    table = block_ids + tl.load(first_block + chunk)
    group = tl.arange(0, G_PADDED)
    place = tl.arange(0, PART_PADDED)
    head = kv_head * G + group
    inside = (place < D // PARTS)[None, :]
    exists = (group < G)[:, None] & inside
    elements = head[:, None] * D + PARTS * place[None, :]  # of the first part
    positions = first_tile * TILE + tl.arange(0, TILE)
    blocks = blocks_of(table, positions, context, BLOCK_SIZE)
    follow(EARLY)
    queries = heads + row * stride_token + elements
    query = tl.load(queries, mask=exists, other=0.0)
    if HAS_SCALES:
        other_query = tl.load(queries + 1, mask=exists, other=0.0).to(tl.float32)
        query = query.to(tl.float32)
        sizes = _sizes(query, other_query)[:, None]
        query, other_query = query / sizes, other_query / sizes
        scale *= sizes
        if heads.dtype.element_ty != tl.float32:
            query, other_query = query.to(tl.float16), other_query.to(tl.float16)
        other_sum = tl.zeros([G_PADDED, PART_PADDED], tl.float32)
        largest_scale = tl.full([1], 1e-38, tl.float32)  # of the values so far

    keys = pool + layer.to(tl.int64) * stride_layer + kv_head.to(tl.int64) * stride_kv_head + place[None, :]
    if HAS_SCALES:
        key_scales = scales + layer.to(tl.int64) * scales_layer + kv_head.to(tl.int64) * scales_kv_head
    highest = tl.full([G_PADDED], float("-inf"), tl.float32)
    # The weights of a row are added up at the end: a sum in each tile would wait for all warps.
    weight_sums = tl.zeros([G_PADDED, TILE], tl.float32)
    sum_of_values = tl.zeros([G_PADDED, PART_PADDED], tl.float32)
    for _ in tl.range(first_tile, last_tile):
        seen = positions < context
        offsets = slot_offsets(blocks, positions, stride_block, stride_place, BLOCK_SIZE)[:, None]
        if HAS_SCALES:
            scale_offsets = slot_offsets(blocks, positions, scales_block, 1, BLOCK_SIZE)
            key_scale = tl.load(key_scales + scale_offsets, mask=seen, other=0.0)
            value_scale = tl.load(key_scales + scales_kind + scale_offsets, mask=seen, other=0.0)
        positions += TILE
        blocks = blocks_of(table, positions, context, BLOCK_SIZE)
        loaded = seen[:, None] & inside
        key = tl.load(keys + offsets, mask=loaded, other=0)
        value = tl.load(keys + stride_kind + offsets, mask=loaded, other=0)

        scores = tl.zeros([G_PADDED, TILE], tl.float32)
        if HAS_SCALES:
            key, other_key = _halves(key, UPCAST)
            key, other_key = key.to(query.dtype), other_key.to(query.dtype)
            scores = products(other_query, tl.trans(other_key), scores, UPCAST)
        scores = products(query, tl.trans(key), scores, UPCAST)
        if HAS_SCALES:
            scores *= key_scale[None, :]
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)[:, None]
        weights = tl.exp2(scores - new_highest[:, None])
        weight_sums = weight_sums * decay + weights
        if HAS_SCALES:
            new_largest = tl.maximum(largest_scale, tl.max(value_scale, 0))
            weights *= (value_scale / new_largest)[None, :]
            decay *= (largest_scale / new_largest)[:, None]
            largest_scale = new_largest
            value, other_value = _halves(value, UPCAST)
            value, other_value = value.to(query.dtype), other_value.to(query.dtype)
            other_sum = products(weights.to(query.dtype), other_value, other_sum * decay, UPCAST)
        sum_of_values = products(weights.to(query.dtype), value, sum_of_values * decay, UPCAST)
        highest = new_highest

    weight_sum = tl.sum(weight_sums, 1)
    if HAS_SCALES:
        sum_of_values *= largest_scale[:, None]
        other_sum *= largest_scale[:, None]
    if num_splits == 1:
        target = attended + row * stride_attended + elements
        tl.store(target, (sum_of_values / weight_sum[:, None]).to(attended.dtype.element_ty), mask=exists)
        if HAS_SCALES:
            tl.store(target + 1, (other_sum / weight_sum[:, None]).to(attended.dtype.element_ty), mask=exists)
    else:
        num_heads = tl.num_programs(0) * G
        part = (chunk.to(tl.int64) * num_heads + head) * num_splits + split
        part_sums = sums + part[:, None] * D + PARTS * place[None, :]
        tl.store(part_sums, sum_of_values, mask=exists)
        if HAS_SCALES:
            tl.store(part_sums + 1, other_sum, mask=exists)
        tl.store(softmaxes + part * 2, highest, mask=group < G)
        tl.store(softmaxes + part * 2 + 1, weight_sum, mask=group < G)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["first_row", "num_positions"])
def join_splits_kernel(
    sums,
    softmaxes,
    first_row,
    num_positions,
    attended,
    num_splits,
    stride_attended,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS_PER_SPLIT: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program joins the splits of one query head of one chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    num_tiles = _num_tiles(tl.load(num_positions + chunk), TILE)
    row = tl.load(first_row + chunk).to(tl.int64)
    follow(EARLY)
    used_splits = _num_used_splits(num_tiles, num_splits, TILE, POSITIONS_PER_SPLIT)
    split = tl.arange(0, SPLITS_PADDED)
    used = split < used_splits
    part = (chunk.to(tl.int64) * tl.num_programs(0) + head) * num_splits + split
    highest = tl.load(softmaxes + part * 2, mask=used, other=float("-inf"))
    weight_sum = tl.load(softmaxes + part * 2 + 1, mask=used, other=0.0)
    element = tl.arange(0, D_PADDED)
    present = used[:, None] & (element < D)[None, :]
    sum_of_values = tl.load(sums + part[:, None] * D + element[None, :], mask=present, other=0.0)

    decay = tl.exp2(highest - tl.max(highest, 0))
    joined = tl.sum(sum_of_values * decay[:, None], 0) / tl.sum(weight_sum * decay, 0)
    target = attended + row * stride_attended + head * D + element
    tl.store(target, joined.to(attended.dtype.element_ty), mask=element < D)


TILE_BYTES = 16 << 10
"""Keys of one tile. A program holds keys and values of two tiles: three programs fit the memory of a processor."""


def _shape_of(head_dim: int, element_size: int, has_scales: bool) -> tuple[int, int]:
    """Positions of a tile, and warps of a program. `element_size` is that of the heads.

    Float32 has no matrix units, and spills in fewer than eight warps. With scales, two warps have the registers for 64
    positions, and wait for each other less than four.
    """
    tile = max(16, min(TILE_BYTES // (padded(head_dim) * element_size), POSITIONS_PER_SPLIT))
    if element_size == 4:
        return (16 if has_scales else tile), 8
    if has_scales:
        return min(tile, 64), 2 if head_dim <= 128 else 4
    return tile, 4


def decode_attention(
    heads: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    first_row: torch.Tensor,
    first_block: torch.Tensor,
    num_positions: torch.Tensor,
    partial: torch.Tensor,
    attended: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    num_chunks, num_kv_heads, block_size = len(num_positions), pool.shape[3], pool.shape[4]
    num_heads, head_dim = heads.shape[1] - 2 * num_kv_heads, heads.shape[2]
    num_splits = partial.shape[2]
    if num_chunks == 0:
        return
    assert heads.stride()[1:] == attended.stride()[1:] == (head_dim, 1)
    assert partial.is_contiguous()
    num_parts = num_chunks * num_heads * num_splits
    scratch = partial.view(-1)
    sums, softmaxes = scratch[: num_parts * head_dim], scratch[num_parts * head_dim :]
    pool, parts = (pool, 1) if scales is None else (pool.view(torch.int16), 2)
    tile, num_warps = _shape_of(head_dim, heads.element_size(), scales is not None)
    constants = {"D": head_dim, "TILE": tile, "POSITIONS_PER_SPLIT": POSITIONS_PER_SPLIT, **early_launch()}
    decode_attention_kernel[num_kv_heads, num_splits, num_chunks](
        heads,
        pool,
        scales,
        block_ids,
        first_row,
        first_block,
        num_positions,
        sums,
        softmaxes,
        attended,
        layer,
        num_splits,
        softmax_scale(head_dim),
        heads.stride(0),
        attended.stride(0),
        *pool_strides(pool),
        *scale_strides(scales),
        HAS_SCALES=scales is not None,
        G=num_heads // num_kv_heads,
        G_PADDED=padded(num_heads // num_kv_heads, 16),
        PARTS=parts,
        PART_PADDED=padded(head_dim // parts, 16),
        BLOCK_SIZE=block_size,
        UPCAST=INTERPRETED,
        **constants,
        num_warps=num_warps,
        num_stages=3,
    )
    if num_splits > 1:
        join_splits_kernel[num_heads, num_chunks](
            sums,
            softmaxes,
            first_row,
            num_positions,
            attended,
            num_splits,
            attended.stride(0),
            D_PADDED=padded(head_dim, 16),
            SPLITS_PADDED=padded(num_splits, MAX_SPLITS),
            num_warps=4,
            **constants,
        )
