"""Products of the GPU engine: torch's own for plain matrices, the operator `fp8_linear` for fp8 matrices."""

from __future__ import annotations

import torch

from engine.fp8 import Fp8Matrix
from engine.gpu.ops import ops
from engine.linear import Linear, Matrix, PlainLinear


class DeviceLinear(PlainLinear):
    """Plain matrices and fp8 matrices."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return Fp8Linear(weight, bias) if isinstance(weight, Fp8Matrix) else super().prepare(weight, bias)


class Fp8Linear:
    def __init__(self, weight: Fp8Matrix, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_empty((inputs.shape[0], self.weight.shape[0]))
        if len(inputs):
            ops.fp8_linear(inputs, self.weight.codes, self.weight.scales, self.bias, outputs)
        return outputs
