"""Products of the GPU engine: for plain matrices, torch's own or `multiply_few_rows`; for fp8, of codes with codes.

    few tokens     quantize_rows -> scaled_mm, exact sums -> scale_products
    many tokens    quantize_rows -> scaled_mm with the scales of rows

Both are torch's products. The second reads and writes the result once less, but its tiles are for many tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from engine.fp8 import CODES, Fp8Matrix
from engine.gpu.ops import FEW_ROWS, FEW_ROWS_COLUMNS, FEW_ROWS_TILE, ops
from engine.linear import Linear, Matrix, PlainLinear

_MANY_TOKENS = 512
_HOPPER = 9


class DeviceLinear(PlainLinear):
    """Plain matrices and fp8 matrices."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, Fp8Matrix):
            return Fp8Linear(weight, bias)
        assert isinstance(weight, torch.Tensor)
        return DeviceProduct(weight, bias, weight.dtype)

    def prepare_head(self, weight: Matrix) -> Linear:
        if isinstance(weight, Fp8Matrix):
            return super().prepare_head(weight)
        assert isinstance(weight, torch.Tensor)
        return DeviceProduct(weight, None, torch.float32)


class DeviceProduct:
    """A plain matrix. Its products of few rows are `multiply_few_rows`, the others are torch's.

    Torch computes all products in float32, whose tokens are the same in every batch, and those with a bias, with a
    matrix of an odd size, or on a device without the matrix units of Hopper.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self.dtype = dtype  # of the results
        num_rows, num_columns = weight.shape
        num_tiles = num_rows // FEW_ROWS_TILE
        num_programs = min(_most_programs(weight.device), num_tiles * (num_columns // FEW_ROWS_COLUMNS))
        is_taken = num_rows % FEW_ROWS_TILE == num_columns % FEW_ROWS_COLUMNS == 0 and bias is None
        self._most_rows = FEW_ROWS if is_taken and num_programs and weight.dtype is not torch.float32 else 0
        self._num_parts = num_programs + num_tiles
        self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
        if weight.device.type == "cuda" and self._most_rows:
            self(weight.new_zeros((1, num_columns)))  # so that no step waits for the compiler

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_tokens = len(inputs)
        if not 0 < num_tokens <= self._most_rows:
            return F.linear(inputs, self.weight, self.bias).to(self.dtype)
        outputs = inputs.new_empty((num_tokens, len(self.weight)), dtype=self.dtype)
        partial = inputs.new_empty((self._num_parts, num_tokens, FEW_ROWS_TILE), dtype=torch.float32)
        ops.multiply_few_rows(inputs, self.weight, partial, self._counters, outputs)
        return outputs


def _most_programs(device: torch.device) -> int:
    """All run at once: two fit in the shared memory of a processor of Hopper."""
    if device.type != "cuda":
        return 3
    properties = torch.cuda.get_device_properties(device)
    return 2 * properties.multi_processor_count if properties.major == _HOPPER else 0


class Fp8Linear:
    def __init__(self, weight: Fp8Matrix, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_tokens = len(inputs)
        if num_tokens == 0:
            return inputs.new_empty((0, self.weight.shape[0]))
        codes = inputs.new_empty(inputs.shape, dtype=CODES)
        scales = inputs.new_empty(num_tokens, dtype=torch.float32)
        ops.quantize_rows(inputs, codes, scales)
        if num_tokens >= _MANY_TOKENS and inputs.dtype is torch.bfloat16:
            return self._scaled(codes, scales)
        outputs = inputs.new_empty((num_tokens, self.weight.shape[0]))
        ops.scale_products(self.weight.products(codes), scales, self.weight.scales, self.bias, outputs)
        return outputs

    def _scaled(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        by_row = ScalingType.RowWise
        matrix, row_scales = self.weight.codes.t(), self.weight.scales[None, :]
        return F.scaled_mm(
            codes, matrix, scales[:, None], by_row, row_scales, by_row, bias=self.bias, output_dtype=torch.bfloat16
        )
