"""A paged KV pool, and the arguments of the attention operators over it. Block tables are random.

C chunks    T tokens    Hq query heads    Hkv KV heads    D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.gpu.ops import PREFILL_TILE_TOKENS

LAYOUTS = ("block-major", "layer-major")
SPLITS_ON_A_CPU = 2


@dataclass(frozen=True, slots=True)
class Shape:
    num_kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    block_size: int = 16
    num_layers: int = 1

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def block_bytes(self, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * dtype.itemsize


def empty_pool(shape: Shape, num_blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """# [num_blocks, num_layers, 2, Hkv, block_size, D], with the strides of the layout"""
    inner = (2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    if layout == "block-major":
        return torch.empty(num_blocks, shape.num_layers, *inner, dtype=dtype, device=device)
    return torch.empty(shape.num_layers, num_blocks, *inner, dtype=dtype, device=device).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The int32 arguments of the attention operators."""

    block_ids: torch.Tensor  # [any]
    first_row: torch.Tensor  # [C]
    first_block: torch.Tensor  # [C]
    start: torch.Tensor  # [C]
    num_tokens: torch.Tensor  # [C]
    num_rows: int

    @property
    def num_positions(self) -> torch.Tensor:
        return self.start + self.num_tokens

    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """tile_chunk and tile_first, with one tile more that is no tile. # int32 [tiles] each"""
        pairs = [
            (chunk, first)
            for chunk, count in enumerate(self.num_tokens.tolist())
            for first in range(0, count, PREFILL_TILE_TOKENS)
        ]
        device = self.block_ids.device
        chunks, firsts = zip(*pairs, (-1, 0), strict=True)
        return _int32(chunks, device), _int32(firsts, device)


def chunks_of(
    starts: Sequence[int], counts: Sequence[int], block_size: int, num_blocks: int, device: torch.device
) -> Chunks:
    """Chunks at these positions, in random blocks of their own. Raises `ValueError` if the pool has too few blocks."""
    needed = [-(-(start + count) // block_size) for start, count in zip(starts, counts, strict=True)]
    if sum(needed) > num_blocks:
        raise ValueError(f"the contexts need {sum(needed)} blocks, the pool has {num_blocks}")
    order = torch.randperm(num_blocks)[: sum(needed)].to(torch.int32)
    return Chunks(
        block_ids=order.to(device),
        first_row=_int32(_starts(counts), device),
        first_block=_int32(_starts(needed), device),
        start=_int32(starts, device),
        num_tokens=_int32(counts, device),
        num_rows=sum(counts),
    )


def random_heads(shape: Shape, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """# [T, Hq + 2 * Hkv, D]"""
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    return torch.randn(num_rows, num_heads, shape.head_dim, device=device).to(dtype)


def scratch(shape: Shape, batch: int, context: int, device: torch.device) -> torch.Tensor:
    """The `partial` of decode_attention, with as many splits as a step takes. # float32 [C, Hq, num_splits, D + 2]"""
    num_splits = SPLITS_ON_A_CPU
    if device.type == "cuda":
        from engine.gpu.decode_attention import num_decode_splits

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_splits = num_decode_splits(batch, shape.num_kv_heads, context, processors)
    return torch.empty(batch, shape.num_heads, num_splits, shape.head_dim + 2, device=device)


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
