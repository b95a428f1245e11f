"""Random pools and steps for the attention kernels. Every slot that no sequence holds is NaN, and so is its scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.kv_layout import FLOAT8, KVLayout
from engine.gpu import reference
from engine.gpu.ops import ops
from engine.gpu.reference import quantized
from engine.kv_pool import KVPool

NUM_LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest difference from the reference. Half precision rounds the result once: 2^-8 of its size in bfloat16."""


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    has_scales: bool = False  # a pool of 8 bits

    @property
    def num_all_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads


@dataclass(frozen=True)
class Context:
    """Sequences in a pool."""

    pool: torch.Tensor
    block_ids: torch.Tensor
    first_block: torch.Tensor
    scales: torch.Tensor | None = None


def poisoned_pool_with_scales(shape: Shape, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """# float8_e4m3fn [blocks, layers, 2, Hkv, block size, D], float32 [blocks, layers, 2, Hkv, block size]"""
    layout = KVLayout("m", FLOAT8, NUM_LAYERS, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = KVPool(layout, num_blocks, torch.device("cpu"))
    pool._bytes.fill_(0xFF)
    assert pool.scales is not None
    return pool.tensor, pool.scales


def poisoned_pool(shape: Shape, num_blocks: int) -> torch.Tensor:
    """# [blocks, layers, 2, Hkv, block size, D]"""
    sizes = [num_blocks, NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim]
    return torch.full(sizes, torch.nan, dtype=shape.dtype)


def random_context(shape: Shape, num_positions: list[int], generator: torch.Generator) -> Context:
    """A pool with sequences of these lengths. Their blocks are shuffled, and other blocks lie between them."""
    counts = [-(-n // shape.block_size) for n in num_positions]
    pool, scales = poisoned_pool(shape, sum(counts) + 2), None
    if shape.has_scales:
        pool, scales = poisoned_pool_with_scales(shape, sum(counts) + 2)
    order = torch.randperm(len(pool), generator=generator, dtype=torch.int32)[: sum(counts)]
    # The first id belongs to no sequence: a kernel that ignores first_block reads another block.
    block_ids = torch.cat((torch.zeros(1, dtype=torch.int32), order))
    first_block = (torch.tensor(counts).cumsum(0) - torch.tensor(counts) + 1).int()
    for first, length in zip(first_block.tolist(), num_positions, strict=True):
        positions = torch.arange(length)
        blocks, places = block_ids[first + positions // shape.block_size].long(), positions % shape.block_size
        cached = torch.randn(length, 2, shape.num_kv_heads, shape.head_dim, generator=generator)
        if scales is None:
            pool[blocks, LAYER, :, :, places] = cached.to(shape.dtype)
        else:  # each row has a size of its own, so that a wrong scale changes the result
            sizes = 2 ** (-4 * torch.rand(length, 2, shape.num_kv_heads, 1, generator=generator))
            codes, scales[blocks, LAYER, :, :, places] = quantized(cached * sizes)
            pool.view(torch.uint8)[blocks, LAYER, :, :, places] = codes.view(torch.uint8)
    return Context(pool, block_ids, first_block, scales)


def random_heads(shape: Shape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    heads = torch.randn(num_tokens, shape.num_all_heads, shape.head_dim, generator=generator)
    return heads.to(shape.dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not expected.isnan().any(), "the reference reads a slot of no sequence"
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[expected.dtype])


def by_both(
    operator: str, device: str, arguments: Sequence[Any], written: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two copies of the argument `written`: the reference wrote the first, on the CPU, the operator the second, on the
    device."""
    results = []
    for operators, where in ((reference, "cpu"), (ops, device)):
        copies = [
            each.to(where, copy=each is written) if isinstance(each, torch.Tensor) else each for each in arguments
        ]
        getattr(operators, operator)(*copies)
        (result,) = (copy for copy, each in zip(copies, arguments, strict=True) if each is written)
        results.append(result.cpu())
    return results[0], results[1]
