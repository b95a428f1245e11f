"""How a model multiplies by its matrices: the interface, and torch's own product.

    T tokens of the step

A `LinearMethod` gets every matrix of the model once, when the model is made. The method returns the `Linear` that
multiplies by the matrix, or the `Embedding` that looks rows up. The matrix may stay plain, be packed for a kernel, or
be quantized. The model keeps no weight, so packing frees the plain copy. Separate methods for separate purposes allow
one pass to compute a product and the next operation (`prepare_gated`, `prepare_head`). A method without such a kernel
composes the two with `Ops`. `choose_linear_method` in `engine/backend.py` chooses the method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.fp8 import Fp8Matrix
from engine.ops import Ops, TorchOps
from engine.quantization import QuantizedMatrix

Matrix = torch.Tensor | QuantizedMatrix | Fp8Matrix  # [out, in]


class Linear(Protocol):
    """One matrix, prepared for products."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs @ weight.T + bias, contiguous, in the inputs' dtype by default. # [T, in] -> [T, out]"""
        ...


class Embedding(Protocol):
    """One matrix, prepared for row lookups."""

    def __call__(self, row_ids: torch.Tensor) -> torch.Tensor:
        """# int64 [T] -> [T, in]"""
        ...


class LinearMethod(Protocol):
    def prepare(
        self,
        weight: Matrix,  # not changed, because the weight may also be the embedding
        bias: torch.Tensor | None,  # [out]
    ) -> Linear:
        """Prepare a matrix once for products of any T. May be slow. Only the result keeps memory."""
        ...

    def prepare_gated(self, gate_up: Matrix) -> Linear:
        """Prepare the first half of a SwiGLU: silu(inputs @ gate.T) * (inputs @ up.T), gate before up in the matrix.

        # of [2 * size, in]: [T, in] -> [T, size]
        """
        ...

    def prepare_head(self, weight: Matrix) -> Linear:
        """Like `prepare`, for the last matrix: the products are the logits, in float32 for every input dtype."""
        ...

    def prepare_embedding(self, table: Matrix) -> Embedding:
        """Like `prepare`, for the table of token embeddings."""
        ...


class LinearThenOps(ABC):
    """For methods whose kernels compute only the product: `Ops` computes the activation, and torch converts logits."""

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
    """Torch's own product on the unchanged weight."""

    def __init__(self, ops: Ops | None = None) -> None:
        super().__init__(ops or TorchOps())

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor), "a quantized matrix needs another method"
        return lambda inputs: F.linear(inputs, weight, bias)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        assert isinstance(table, torch.Tensor), "a quantized matrix needs another method"
        return lambda row_ids: F.embedding(row_ids, table)
