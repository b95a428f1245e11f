"""Matrices packed once for a faster product: by our own C kernel, or by oneDNN through torch. For bfloat16 on the CPU.

The kernel is memory-bound for a few rows and compute-bound from some thirty on, near the core's limit in both; oneDNN
knows AMX, which the kernel does not. Both leave a matrix of another dtype to torch's plain product.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F

from engine.huge_pages import HugePages
from engine.linear import Embedding, Linear, Matrix, PlainLinear
from engine.native_kernels import Kernels

PANEL = 32  # rows of a weight that lie together, as in bf16_linear.c


class NativeLinear(PlainLinear):
    """The C kernel, where the library has it: `kernels.bf16_linear` is not None."""

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        self.kernels = kernels
        self.num_threads = num_threads
        self._memory = HugePages()
        self._table: weakref.ref[torch.Tensor] | None = None  # the embedding, as long as it is there,
        self._packed_table: torch.Tensor | None = None  # and its panels: a tied head is multiplied by the same ones

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        if not _packs(weight):
            return super().prepare(weight, bias)
        assert isinstance(weight, torch.Tensor), "codes are not packed"
        tied = self._table is not None and self._table() is weight
        packed = self._packed_table if tied else None
        return PackedLinear(
            self.kernels, self._pack(weight) if packed is None else packed, bias, len(weight), self.num_threads
        )

    def prepare_embedding(self, table: Matrix) -> Embedding:
        if not _packs(table):
            return super().prepare_embedding(table)
        assert isinstance(table, torch.Tensor), "codes are not packed"
        packed = self._pack(table)
        self._table, self._packed_table = weakref.ref(table), packed
        return lambda row_ids: packed[row_ids // PANEL, :, row_ids % PANEL].view(torch.bfloat16)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        panels = panels_of(weight)
        packed = self._memory.take(panels.numel() * 4).view(torch.int32).view(panels.shape)
        return packed.copy_(panels)


def _packs(weight: Matrix) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the kernel reads it, but for being contiguous.

    # bfloat16 [out, in] -> int32 [ceil(out / PANEL), in / 2, PANEL], each element two bfloat16 of one row
    """
    out_size, in_size = weight.shape
    num_panels = -(-out_size // PANEL)
    padded = F.pad(weight, (0, 0, 0, num_panels * PANEL - out_size))
    return padded.view(torch.int32).view(num_panels, PANEL, in_size // 2).transpose(1, 2)


class PackedLinear:
    """A product by the C kernel."""

    def __init__(
        self,
        kernels: Kernels,
        packed: torch.Tensor,  # int32, contiguous: what `panels_of` says
        bias: torch.Tensor | None,  # [out]
        out_size: int,
        num_threads: int,
    ) -> None:
        assert kernels.bf16_linear is not None, "the library was not compiled for bfloat16 products"
        assert packed.is_contiguous(), "the kernel is given its address"
        self.kernel = kernels.bf16_linear
        self.packed, self.bias = packed, None if bias is None else bias.float()
        self.weight_address = packed.data_ptr()
        self.bias_address = None if self.bias is None else self.bias.data_ptr()
        self.out_size, self.in_size, self.num_threads = out_size, 2 * packed.shape[1], num_threads

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows, in_size = inputs.shape
        assert in_size == self.in_size, "the kernel would read past a row's end"
        assert inputs.dtype is torch.bfloat16, "the kernel reads bfloat16"
        inputs = inputs.contiguous()
        out = inputs.new_empty((num_rows, self.out_size))
        self.kernel(
            inputs.data_ptr(),
            self.weight_address,
            self.bias_address,
            out.data_ptr(),
            num_rows,
            self.out_size,
            in_size,
            self.num_threads,
        )
        return out


class OneDNNLinear(PlainLinear):
    """oneDNN's product on a weight in the layout that oneDNN likes best."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        if weight.dtype is not torch.bfloat16 or not isinstance(weight, torch.Tensor):
            return super().prepare(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return lambda inputs: multiply(inputs, packed, bias, "none", [], "")
