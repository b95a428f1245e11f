"""The reference for products with quantized matrices: torch on the dequantized matrix."""

from __future__ import annotations

import torch

from engine.fp8 import Fp8Matrix, quantized, scaled
from engine.linear import Embedding, Linear, LinearThenOps, Matrix, PlainLinear
from engine.ops import TorchOps


class DequantizedLinear(LinearThenOps):
    """Dequantizes each matrix once. The matrix then takes the memory of an unquantized one."""

    def __init__(self) -> None:
        super().__init__(TorchOps())
        self._plain = PlainLinear()

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return self._plain.prepare(_plain(weight), bias)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        return self._plain.prepare_embedding(_plain(table))


class Fp8Products(DequantizedLinear):
    """Multiplies the codes of fp8 matrices with codes of its inputs, as the GPU engine does, by torch's operations."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        if not isinstance(weight, Fp8Matrix):
            return super().prepare(weight, bias)

        def multiply(inputs: torch.Tensor) -> torch.Tensor:
            codes, scales = quantized(inputs)
            return scaled(weight.products(codes), scales, weight.scales, bias).to(inputs.dtype)

        return multiply


def _plain(weight: Matrix) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()
