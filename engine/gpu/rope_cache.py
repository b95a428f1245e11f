"""The kernel of `rope_and_cache`: rotate queries and keys, and write keys and values into their slots.

One program takes one token and up to 16 of its heads, so the row of angles is read once for many heads. Heads are
queries, keys and values in this order. A half of a head is contiguous, and each thread moves 16 bytes of it. In a pool
with scales, a head's scale is its largest size / 448.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.fp8 import LARGEST_CODE, SMALLEST_MAXIMUM
from engine.gpu.attention_tiles import INTERPRETED, padded, pool_strides, scale_strides
from engine.gpu.early_launch import early_launch, follow
from engine.gpu.fp8_kernels import rounded_to_codes

HEADS_PER_PROGRAM = 16


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def rope_and_cache_kernel(
    heads,
    cosine,
    sine,
    positions,
    slots,
    pool,
    scales,
    layer,
    stride_token,
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
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    SMALLEST_MAXIMUM: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    element = tl.arange(0, HALF_PADDED)
    inside = element < HALF
    exists = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]

    angle = tl.load(positions + token).to(tl.int64) * HALF + element
    cos = tl.load(cosine + angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(sine + angle, mask=inside, other=0.0)[None, :]
    slot = tl.load(slots + token)
    follow(EARLY)
    source = heads + token * stride_token + head[:, None] * (2 * HALF) + element[None, :]
    first = tl.load(source, mask=exists, other=0.0)
    second = tl.load(source + HALF, mask=exists, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    rotates = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    first = tl.where(rotates, (wide_first * cos - wide_second * sin).to(first.dtype), first)
    second = tl.where(rotates, (wide_second * cos + wide_first * sin).to(second.dtype), second)

    is_query = exists & (head < NUM_HEADS)[:, None]
    tl.store(source, first, mask=is_query)
    tl.store(source + HALF, second, mask=is_query)

    cached = tl.maximum(head - NUM_HEADS, 0)
    kind, kv_head = cached // NUM_KV_HEADS, cached % NUM_KV_HEADS
    block, place_in_block = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    place = block * stride_block + place_in_block * stride_place
    place += layer.to(tl.int64) * stride_layer
    target = pool + place + (kind * stride_kind + kv_head * stride_kv_head)[:, None] + element[None, :]
    is_cached = exists & (head >= NUM_HEADS)[:, None]
    if HAS_SCALES:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1), SMALLEST_MAXIMUM)
        inverse = (LARGEST_CODE / largest)[:, None]
        first, second = first * inverse, second * inverse
        if INTERPRETED:
            first, second = rounded_to_codes(first), rounded_to_codes(second)
        scale = scales + block * scales_block + layer.to(tl.int64) * scales_layer + place_in_block
        scale += kind * scales_kind + kv_head * scales_kv_head
        is_head = (head >= NUM_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        tl.store(scale, largest / LARGEST_CODE, mask=is_head)
    tl.store(target, first.to(pool.dtype.element_ty), mask=is_cached)
    tl.store(target + HALF, second.to(pool.dtype.element_ty), mask=is_cached)


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
    num_tokens, num_all_heads, head_dim = heads.shape
    if num_tokens == 0:
        return
    assert heads.stride()[1:] == (head_dim, 1)
    assert cosine.is_contiguous()
    assert sine.is_contiguous()
    num_kv_heads = pool.shape[3]
    heads_per_program = min(HEADS_PER_PROGRAM, padded(num_all_heads))
    rope_and_cache_kernel[num_tokens, triton.cdiv(num_all_heads, heads_per_program)](
        heads,
        cosine,
        sine,
        positions,
        slots,
        pool,
        scales,
        layer,
        heads.stride(0),
        *pool_strides(pool),
        *scale_strides(scales),
        NUM_HEADS=num_all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=padded(head_dim // 2),
        BLOCK_SIZE=pool.shape[4],
        HEADS=heads_per_program,
        HAS_SCALES=scales is not None,
        INTERPRETED=INTERPRETED,
        LARGEST_CODE=LARGEST_CODE,
        SMALLEST_MAXIMUM=SMALLEST_MAXIMUM,
        num_warps=4,
        **early_launch(),
    )
