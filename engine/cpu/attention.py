"""Attention by the C kernels. The kernels read the KV pool in place, block by block, without a gather.

Chunks of one token (decode) and chunks of several tokens (prefill) have separate kernels.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from engine.batch import Batch
from engine.block_tables import BlockTables, StepTables
from engine.cpu.kernels import Kernels, KVCacheStruct, PagedBatchStruct, StepAttentionStruct
from engine.kv_pool import KVPool
from engine.rotary import Rotation


class NativeAttention:
    """For float32 and bfloat16 pools in host memory. The head size must be a multiple of 2 * LANES of the library."""

    def __init__(self, kernels: Kernels, pool: KVPool, num_heads: int, num_threads: int) -> None:
        layout, tensor = pool.layout, pool.tensor
        block, layer, value, head, row, _ = (stride * tensor.element_size() for stride in tensor.stride())
        self.kernels = kernels
        self.pool = pool
        self.block_size = layout.block_size
        self.num_heads = num_heads
        self.block_tables = BlockTables(pool.num_blocks, layout.block_size)
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

    def begin_step(self, batch: Batch, rotation: Rotation) -> NativeStepAttention:
        tables = self.block_tables.begin_step(batch)
        decodes = batch.num_tokens == 1
        batches = _PagedBatch(batch, tables, decodes), _PagedBatch(batch, tables, ~decodes)
        return NativeStepAttention(self, rotation, self._slots(batch, tables), batches)

    def _slots(self, batch: Batch, tables: StepTables) -> np.ndarray:
        """The offset of each row's key of layer 0, head 0. # int64 [T] bytes from the pool's base"""
        blocks = tables.block_of_each_token(batch, self.block_size)
        return blocks * self.cache.block_stride + batch.positions % self.block_size * self.cache.row_stride


class _PagedBatch:
    """A `paged_batch` of the chosen chunks, and the arrays that the struct points to."""

    def __init__(self, batch: Batch, tables: StepTables, chosen: np.ndarray) -> None:
        self.struct = PagedBatchStruct(num_sequences=np.count_nonzero(chosen))
        if not self.struct.num_sequences:
            return
        self._arrays = {
            "tables": tables.table,
            "first_block": tables.rows[chosen] * tables.table.shape[1],
            "first_row": batch.first_row[chosen],
            "num_tokens": batch.num_tokens[chosen],
            "start": batch.start[chosen],
        }
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
        batches: tuple[_PagedBatch, _PagedBatch],  # decodes, prefills
    ) -> None:
        self.backend = backend
        self.kernel = backend.kernels.attend
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
        return self.attended

    def _check(self, heads: torch.Tensor) -> None:
        cache, num_rows = self.backend.cache, len(self.attended)
        shape = (num_rows, cache.num_heads + 2 * cache.num_kv_heads, cache.head_dim)
        assert heads.shape == shape, "the kernel reads the heads of every row of the step"
        assert heads.is_contiguous(), "the kernel rotates heads in place"
        assert heads.dtype is self.dtype, "the model and the pool have different dtypes"
