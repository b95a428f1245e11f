"""The common parts of the attention kernels: addresses in the paged pool, and the online softmax of one tile.

A kernel walks over a context in tiles of positions. A position outside the context is never loaded: the mask of the
load puts 0 in its place, so the contents of such a slot reach no result. The softmax is in powers of 2: the caller's
`scale` includes log2(e).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""The interpreter multiplies the bits of bfloat16 as integers, so kernels convert to float32 before a product there."""


def softmax_scale(head_dim: int) -> float:
    return math.log2(math.e) / math.sqrt(head_dim)


def padded(size: int, least: int = 1) -> int:
    """The power of two that is at least `size` and at least `least`: Triton's tiles have no other sizes."""
    return max(least, 1 << (size - 1).bit_length())


def pool_strides(pool: torch.Tensor) -> tuple[int, ...]:
    """The strides of block, layer, key or value, KV head and place in the block, in elements."""
    assert pool.stride(5) == 1
    return pool.stride()[:5]


def scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """The strides of block, layer, key or value, and KV head. Any numbers for a pool without scales."""
    if scales is None:
        return (0, 0, 0, 0)
    assert scales.stride(4) == 1
    return scales.stride()[:4]


@triton.jit
def blocks_of(block_ids, positions, end, BLOCK_SIZE: tl.constexpr):
    """The block of each position before `end`.

    A loop loads the blocks of a tile one tile ahead. If the same iteration loaded the blocks and then the keys, the
    compiler would spend its stages on the blocks, and would keep one tile of keys in flight.
    """
    return tl.load(block_ids + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def slot_offsets(blocks, positions, stride_block, stride_place, BLOCK_SIZE: tl.constexpr):
    """Offsets of positions in the pool, in elements. A pool may have more than 2^31 elements. # int64 [positions]"""
    return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_place


@triton.jit
def products(left, right, total, UPCAST: tl.constexpr):
    """total + left @ right in float32; float32 operands keep their full precision."""
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
