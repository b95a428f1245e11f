"""The reference for products with quantized matrices: torch on the dequantized matrix."""

from __future__ import annotations

import torch

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


def _plain(weight: Matrix) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()
