"""Attention by the C kernels. The kernels read the KV pool in place, block by block, without a gather.

Chunks of one token (decode) and chunks of several tokens (prefill) have separate kernels. On CPUs with AMX's bfloat16
tiles, torch is faster for prefill in spite of its gather: `torch_prefill` chooses torch there.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.step import ScheduledChunk
from engine.attention import PrefillPart, TorchAttention
from engine.cpu.kernels import Kernels, KVCacheStruct, PagedBatchStruct, StepAttentionStruct
from engine.kv_pool import KVPool
from engine.rotary import Rotation


class NativeAttention:
    """For float32 and bfloat16 pools in host memory. The head size must be a multiple of 2 * LANES of the library."""

    def __init__(
        self, kernels: Kernels, pool: KVPool, num_heads: int, num_threads: int, torch_prefill: bool = False
    ) -> None:
        layout, tensor = pool.layout, pool.tensor
        block, layer, value, head, row, _ = (stride * tensor.element_size() for stride in tensor.stride())
        self.kernels = kernels
        self.pool = pool
        self.block_size = layout.block_size
        self.num_heads = num_heads
        self.torch_prefill = TorchAttention(pool) if torch_prefill else None
        self.cache = KVCacheStruct(
            base=pool.address(),
            block_stride=block,
            layer_stride=layer,
            value_stride=value,
            head_stride=head,
            row_stride=row,
            block_size=layout.block_size,
            head_dim=layout.head_dim,
            num_heads=num_heads,
            num_kv_heads=layout.num_kv_heads,
            is_bf16=tensor.dtype is torch.bfloat16,
            num_threads=num_threads,
            scale=1.0 / math.sqrt(layout.head_dim),
        )

    def begin_step(self, chunks: Sequence[ScheduledChunk], rotation: Rotation) -> NativeStepAttention:
        num_tokens = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        start = np.array([chunk.start for chunk in chunks], np.int32)
        num_blocks = -(-(start + num_tokens) // self.block_size)
        tables: list[int] = []
        for chunk, count in zip(chunks, num_blocks.tolist(), strict=True):
            tables += chunk.sequence.block_table[:count]
        rows = _Rows(
            tables=np.array(tables, np.int32),
            first_block=np.cumsum(num_blocks, dtype=np.int32) - num_blocks,
            first_row=np.cumsum(num_tokens, dtype=np.int32) - num_tokens,
            num_tokens=num_tokens,
            start=start,
        )
        assert len(tables) == num_blocks.sum(), "a table is shorter than its sequence"
        assert rows.tables.min() >= 0, "the kernel would read outside the pool"
        assert rows.tables.max() < self.pool.num_blocks, "the kernel would read outside the pool"
        decodes = num_tokens == 1
        prefills = ~decodes if self.torch_prefill is None else np.zeros_like(decodes)
        torch_prefills: list[PrefillPart] = []
        if self.torch_prefill is not None and not decodes.all():
            torch_prefills = self.torch_prefill.prefills_of(chunks)
        batches = _Batch(rows, decodes), _Batch(rows, prefills)
        return NativeStepAttention(self, rotation, self._slots(rows), batches, torch_prefills)

    def _slots(self, rows: _Rows) -> np.ndarray:
        """The offset of each row's key of layer 0, head 0. # int64 [T] bytes from the pool's base"""
        chunk = np.repeat(np.arange(len(rows.start)), rows.num_tokens)  # of each row
        positions = rows.start[chunk] + np.arange(len(chunk)) - rows.first_row[chunk]
        blocks = rows.tables[rows.first_block[chunk] + positions // self.block_size].astype(np.int64)
        return blocks * self.cache.block_stride + positions % self.block_size * self.cache.row_stride


@dataclass(frozen=True, slots=True)
class _Rows:
    """All chunks of a step, as int32 arrays. All but `tables` have one element per chunk."""

    tables: np.ndarray  # the chunks' block tables, concatenated
    first_block: np.ndarray  # index in `tables` of the chunk's first block
    first_row: np.ndarray  # of the step's rows
    num_tokens: np.ndarray
    start: np.ndarray


class _Batch:
    """A `paged_batch` of the chosen chunks, and the arrays that the struct points to."""

    def __init__(self, rows: _Rows, chosen: np.ndarray) -> None:
        self.struct = PagedBatchStruct(num_sequences=int(chosen.sum()))
        if not self.struct.num_sequences:
            return
        self._arrays = {
            name: np.ascontiguousarray(getattr(rows, name)[chosen])
            for name in ("first_block", "first_row", "num_tokens", "start")
        } | {"tables": rows.tables}
        for name, array in self._arrays.items():
            setattr(self.struct, name, array.ctypes.data)


class NativeStepAttention:
    """One step's batches and pointers, made once per step: each layer then costs little more than the kernel call.

    `attend` returns the same memory for every layer.
    """

    def __init__(
        self,
        backend: NativeAttention,
        rotation: Rotation,
        slots: np.ndarray,  # int64 [T] bytes from the pool's base
        batches: tuple[_Batch, _Batch],  # decodes, prefills
        torch_prefills: list[PrefillPart],
    ) -> None:
        self.backend = backend
        self.kernel = backend.kernels.attend
        self.torch_prefills = torch_prefills
        self.dtype = backend.pool.tensor.dtype
        self.attended = torch.empty((len(slots), backend.num_heads, backend.cache.head_dim), dtype=self.dtype)
        self.attended_address = self.attended.data_ptr()
        self._pointed_to = rotation, slots, batches
        self.struct = StepAttentionStruct(
            cache=ctypes.addressof(backend.cache),
            cosine=rotation.cosine.data_ptr(),
            sine=rotation.sine.data_ptr(),
            slots=slots.ctypes.data,
            num_rows=len(slots),
            decodes=batches[0].struct,
            prefills=batches[1].struct,
        )
        self.address = ctypes.addressof(self.struct)

    def attend(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """See `StepAttention`. The kernel takes 20 us for a short sequence, so this method must be short."""
        if layer == 0:
            self._check(heads)  # the same product makes the heads of the other layers
        if self.kernel(self.address, heads.data_ptr(), self.attended_address, layer):
            raise MemoryError("no memory for attention's scratch")
        if self.torch_prefills:
            self._attend_with_torch(heads, self.attended, layer)
        return self.attended

    def _check(self, heads: torch.Tensor) -> None:
        assert heads.is_contiguous(), "the kernel rotates heads in place"
        assert heads.dtype is self.dtype, "the model and the pool have different dtypes"

    def _attend_with_torch(self, heads: torch.Tensor, attended: torch.Tensor, layer: int) -> None:
        torch_prefill = self.backend.torch_prefill
        assert torch_prefill is not None
        num_heads, num_kv_heads = self.backend.num_heads, torch_prefill.num_kv_heads
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        for part in self.torch_prefills:
            rows = slice(part.first_row, part.first_row + part.num_tokens)
            attended[rows] = torch_prefill.attend_prefill(part, query, key, value, layer)
