"""How a model multiplies by its matrices: the interface, and torch's own product as it is.

    T tokens of the step

A `LinearMethod` sees every matrix of the model once, when the model is made, and answers with what multiplies by it
(or looks rows up in it): the weight as it is, packed for a kernel, or of codes. It keeps what it needs of the weight,
and the model keeps nothing, so a method that packs frees the plain copy. Which method a model gets is decided in
`choose_linear_method` of `engine/torch_runner.py`; another precision or device is a class beside this one, named there.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.quantization import QuantizedMatrix

Matrix = torch.Tensor | QuantizedMatrix  # [out, in]


class Linear(Protocol):
    """One matrix, ready to be multiplied by."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs @ weight.T + bias, contiguous, in the inputs' dtype. # [T, in] -> [T, out]"""
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
        """Called once for each matrix; any T may come later. Takes the time it needs, and no more memory for good."""
        ...

    def prepare_embedding(self, table: Matrix) -> Embedding:
        """As `prepare`, for the table of the tokens' embeddings."""
        ...


class PlainLinear:
    """The method that changes nothing: torch's own product on the weight as it is."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor), "codes have methods of their own"
        return lambda inputs: F.linear(inputs, weight, bias)

    def prepare_embedding(self, table: Matrix) -> Embedding:
        assert isinstance(table, torch.Tensor), "codes have methods of their own"
        return lambda row_ids: F.embedding(row_ids, table)
