"""Products of the GPU engine: torch's own for plain matrices; for fp8 matrices, of codes with codes.

    few tokens     quantize_rows -> scaled_mm, exact sums -> scale_products
    many tokens    quantize_rows -> scaled_mm with the scales of rows

Both are torch's products. The second reads and writes the result once less, but its tiles are for many tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from engine.fp8 import CODES, Fp8Matrix
from engine.gpu.ops import ops
from engine.linear import Linear, Matrix, PlainLinear

_MANY_TOKENS = 512


class DeviceLinear(PlainLinear):
    """Plain matrices and fp8 matrices."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return Fp8Linear(weight, bias) if isinstance(weight, Fp8Matrix) else super().prepare(weight, bias)


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
