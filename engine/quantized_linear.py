"""The reference for products with quantized matrices: torch on the dequantized matrix."""

from __future__ import annotations

import torch

from engine.fp8 import CODES, Fp8Matrix, quantize_rows
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
            codes, scales = torch.empty_like(inputs, dtype=CODES), inputs.new_empty(len(inputs), dtype=torch.float32)
            quantize_rows(inputs, codes, scales)
            products = weight.products(codes) * (weight.scales * scales[:, None])
            return (products if bias is None else products + bias.float()).to(inputs.dtype)

        return multiply


def _plain(weight: Matrix) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()
