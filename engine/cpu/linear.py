"""Products with packed bfloat16 matrices on the CPU, by the C kernel: AMX's tiles or AVX-512.

The kernel is memory-bound for a few rows and compute-bound from about thirty rows on, near the core's limit in both
cases. A row's result does not depend on the other rows. Matrices of another dtype use torch's plain product.
"""

from __future__ import annotations

import weakref
from typing import TypeGuard

import torch
import torch.nn.functional as F

from engine.cpu.kernels import Ending, Kernels
from engine.cpu.ops import NativeOps
from engine.host_memory import HugePages
from engine.linear import Embedding, Linear, Matrix, PlainLinear

PANEL = 32  # rows of a weight in one panel, as in product.h


class NativeLinear(PlainLinear):
    """Products by the C kernel. The library must have `kernels.bf16_linear`."""

    def __init__(self, kernels: Kernels, num_threads: int, memory: HugePages | None = None) -> None:
        super().__init__(NativeOps(kernels, num_threads))
        self.kernels = kernels
        self.num_threads = num_threads
        self._memory = memory or HugePages()
        self._table: weakref.ref[torch.Tensor] | None = None  # the embedding, while it exists
        self._packed_table: torch.Tensor | None = None  # the embedding's panels, which a tied head reuses

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        if not _packs(weight):
            return super().prepare(weight, bias)
        return PackedLinear(self.kernels, self._pack(panels_of(weight)), bias, len(weight), self.num_threads)

    def prepare_gated(self, gate_up: Matrix) -> Linear:
        if not _packs(gate_up):
            return super().prepare_gated(gate_up)
        packed, size = self._pack(gated_panels_of(gate_up)), len(gate_up) // 2
        return PackedLinear(self.kernels, packed, None, size, self.num_threads, Ending.TO_GATED)

    def prepare_head(self, weight: Matrix) -> Linear:
        if not _packs(weight):
            return super().prepare_head(weight)
        tied = self._table is not None and self._table() is weight
        packed = self._packed_table if tied else None
        if packed is None:
            packed = self._pack(panels_of(weight))
        return PackedLinear(self.kernels, packed, None, len(weight), self.num_threads, Ending.TO_FLOAT)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        if not _packs(table):
            return super().prepare_embedding(table)
        packed = self._pack(panels_of(table))
        self._table, self._packed_table = weakref.ref(table), packed
        return lambda row_ids: packed[row_ids // PANEL, :, row_ids % PANEL].view(torch.bfloat16)

    def _pack(self, panels: torch.Tensor) -> torch.Tensor:
        packed = self._memory.take(panels.numel() * 4).view(torch.int32).view(panels.shape)
        return packed.copy_(panels)


def _packs(weight: Matrix) -> TypeGuard[torch.Tensor]:
    return isinstance(weight, torch.Tensor) and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the order that the kernel reads, as a view that is not contiguous.

    # bfloat16 [out, in] -> int32 [ceil(out / PANEL), in / 2, PANEL], each element two bfloat16 of one row
    """
    out_size, in_size = weight.shape
    num_panels = -(-out_size // PANEL)
    padded = F.pad(weight, (0, 0, 0, num_panels * PANEL - out_size))
    return padded.view(torch.int32).view(num_panels, PANEL, in_size // 2).transpose(1, 2)


def gated_panels_of(gate_up: torch.Tensor) -> torch.Tensor:
    """Like `panels_of`; half of each panel's rows are from gate, half from up. # of [2 * size, in]"""
    half = PANEL // 2
    size, in_size = len(gate_up) // 2, gate_up.shape[1]
    both = F.pad(gate_up.view(2, size, in_size), (0, 0, 0, -size % half))
    return panels_of(both.view(2, -1, half, in_size).transpose(0, 1).reshape(-1, in_size))


class PackedLinear:
    """A product by the C kernel; `ending` chooses the form of the results."""

    def __init__(
        self,
        kernels: Kernels,
        packed: torch.Tensor,  # int32, contiguous, in the order of `panels_of` or `gated_panels_of`
        bias: torch.Tensor | None,  # [out]; none for a gated product
        out_size: int,  # columns of the results
        num_threads: int,
        ending: Ending = Ending.TO_BF16,
    ) -> None:
        assert kernels.bf16_linear is not None, "the library was not compiled for bfloat16 products"
        assert packed.is_contiguous(), "the kernel reads the panels by address"
        assert len(packed) == -(-out_size // (PANEL // 2 if ending is Ending.TO_GATED else PANEL)), "wrong panel count"
        assert bias is None or ending is not Ending.TO_GATED, "the kernel adds no bias before an activation"
        self.kernel = kernels.bf16_linear
        self.packed, self.bias = packed, None if bias is None else bias.float()
        self.weight_address = packed.data_ptr()
        self.bias_address = None if self.bias is None else self.bias.data_ptr()
        self.out_size, self.in_size, self.num_threads = out_size, 2 * packed.shape[1], num_threads
        self.ending = int(ending)
        self.dtype = torch.float32 if ending is Ending.TO_FLOAT else torch.bfloat16

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows, in_size = inputs.shape
        assert in_size == self.in_size, "the kernel would read past a row's end"
        assert inputs.dtype is torch.bfloat16, "the kernel reads bfloat16"
        inputs = inputs.contiguous()
        out = inputs.new_empty((num_rows, self.out_size), dtype=self.dtype)
        self.kernel(
            inputs.data_ptr(),
            self.weight_address,
            self.bias_address,
            out.data_ptr(),
            num_rows,
            self.out_size,
            in_size,
            self.ending,
            self.num_threads,
        )
        return out
