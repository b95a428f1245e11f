"""How a model multiplies by its matrices: the interface, and torch's own product.

    T tokens of the step

A `LinearMethod` gets every matrix of the model once, when the model is made. The method returns the `Linear` that
multiplies by the matrix, or the `Embedding` that looks rows up: plain, packed for a kernel, or of codes. The model
keeps no weight, so a method that packs frees the plain copy. A method knows the purpose of each matrix: one pass may
compute the product and the step after it (`prepare_gated`, `prepare_head`). A method without such a kernel composes the
two with `Ops`. `choose_linear_method` in `engine/backend.py` chooses; another precision or device is another class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.ops import Ops, TorchOps
from engine.quantization import QuantizedMatrix

Matrix = torch.Tensor | QuantizedMatrix  # [out, in]


class Linear(Protocol):
    """One matrix, ready to be multiplied by."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs @ weight.T + bias, contiguous, in the inputs' dtype if not said otherwise. # [T, in] -> [T, out]"""
        ...


class Embedding(Protocol):
    """One matrix, ready to be looked up in."""

    def __call__(self, row_ids: torch.Tensor) -> torch.Tensor:
        """# int64 [T] -> [T, in]"""
        ...


class LinearMethod(Protocol):
    def prepare(
        self,
        weight: Matrix,  # left as it is, since it may be the embedding, too
        bias: torch.Tensor | None,  # [out]
    ) -> Linear:
        """Called once for each matrix; later calls may have any T. May be slow. Lasting memory: only the result."""
        ...

    def prepare_gated(self, gate_up: Matrix) -> Linear:
        """The first half of a SwiGLU: silu(inputs @ gate.T) * (inputs @ up.T), gate before up in the matrix.

        # of [2 * size, in]: [T, in] -> [T, size]
        """
        ...

    def prepare_head(self, weight: Matrix) -> Linear:
        """As `prepare`, for the last matrix: its products are the logits, in float32 whatever the inputs are."""
        ...

    def prepare_embedding(self, table: Matrix) -> Embedding:
        """As `prepare`, for the table of the tokens' embeddings."""
        ...


class LinearThenOps(ABC):
    """For methods without kernels of more than a product: gated ones and the head are composed of it and `Ops`."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    @abstractmethod
    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear: ...

    def prepare_gated(self, gate_up: Matrix) -> Linear:
        multiply = self.prepare(gate_up, None)
        return lambda inputs: self.ops.silu_and_multiply(multiply(inputs))

    def prepare_head(self, weight: Matrix) -> Linear:
        multiply = self.prepare(weight, None)
        return lambda inputs: multiply(inputs).float()


class PlainLinear(LinearThenOps):
    """The method that changes nothing: torch's own product on the weight as it is."""

    def __init__(self, ops: Ops | None = None) -> None:
        super().__init__(ops or TorchOps())

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor), "codes have methods of their own"
        return lambda inputs: F.linear(inputs, weight, bias)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        assert isinstance(table, torch.Tensor), "codes have methods of their own"
        return lambda row_ids: F.embedding(row_ids, table)
