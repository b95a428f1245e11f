"""Products with quantized matrices by the C kernel."""

from __future__ import annotations

import ctypes

import torch

from engine.cpu.kernels import Kernels, QuantizedMatrixStruct
from engine.cpu.ops import NativeOps
from engine.linear import Embedding, Linear, LinearThenOps, Matrix
from engine.quantization import GROUP, QuantizedMatrix

_SCRATCH_PER_GROUP = GROUP + 8  # bytes: the rounded inputs and the struct group_input of quantized_linear.c


class NativeQuantizedLinear(LinearThenOps):
    """Products by the C kernel, which rounds the inputs to 8 bits by groups of 32."""

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        super().__init__(NativeOps(kernels, num_threads))
        self.kernels = kernels
        self.num_threads = num_threads
        self._scratch = torch.empty(0, dtype=torch.int64)

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, QuantizedMatrix)
        return NativeQuantizedMatrix(self, weight, bias)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        assert isinstance(table, QuantizedMatrix)
        return NativeQuantizedMatrix(self, table, None).rows

    def scratch(self, num_bytes: int) -> int:
        """The address of scratch memory, valid until the next call. Products run one at a time."""
        if self._scratch.numel() * 8 < num_bytes:
            self._scratch = torch.empty(-(-num_bytes // 8), dtype=torch.int64)
        return self._scratch.data_ptr()


class NativeQuantizedMatrix:
    """One matrix, prepared for products and lookups."""

    def __init__(self, method: NativeQuantizedLinear, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self._method, self._matrix = method, matrix
        self._bias = None if bias is None else bias.float()
        self._is_bf16 = matrix.dtype is torch.bfloat16
        self._scratch_per_row = matrix.num_groups * _SCRATCH_PER_GROUP
        self._struct = QuantizedMatrixStruct(
            matrix.codes.data_ptr(),
            matrix.scales.data_ptr(),
            None if matrix.minimums is None else matrix.minimums.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            matrix.num_rows,
            matrix.num_columns,
            matrix.num_groups,
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = inputs.shape
        assert num_columns == self._matrix.num_columns, "the kernel would read past a row's end"
        assert inputs.dtype is self._matrix.dtype, "the kernel reads rows of the matrix's dtype"
        inputs = inputs.contiguous()
        outputs = inputs.new_empty((num_rows, self._matrix.num_rows))
        self._method.kernels.quantized_linear(
            self._address,
            inputs.data_ptr(),
            outputs.data_ptr(),
            num_rows,
            self._method.scratch(num_rows * self._scratch_per_row),
            self._is_bf16,
            self._method.num_threads,
        )
        return outputs

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Dequantized rows of the matrix. Raises `IndexError` as torch does. # int32 or int64 [n] -> [n, columns]"""
        row_ids = row_ids.long().contiguous()
        rows = torch.empty((len(row_ids), self._matrix.num_columns), dtype=self._matrix.dtype)
        if self._method.kernels.quantized_rows(
            self._address, row_ids.data_ptr(), len(row_ids), rows.data_ptr(), self._is_bf16
        ):
            raise IndexError(f"a row id is outside the matrix of {self._matrix.num_rows} rows")
        return rows
