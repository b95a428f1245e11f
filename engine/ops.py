"""The operations between a layer's matrix products: the interface, and the implementation in plain torch.

`choose_backend` in `engine/backend.py` chooses the implementation.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Ops(Protocol):
    def add_rms_norm(
        self,
        hidden: torch.Tensor,  # [T, hidden], changed in place
        update: torch.Tensor | None,  # [T, hidden]; invalid afterwards, because the result may use its memory
        weight: torch.Tensor,  # [hidden]
        epsilon: float,
    ) -> torch.Tensor:  # [T, hidden]
        """hidden += update, then its RMS norm: x / sqrt(mean(x^2) + epsilon) * weight."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, the activation of SwiGLU. # [T, 2 * size], gate before up -> [T, size]"""
        ...


class TorchOps:
    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        if update is not None:
            hidden += update
        return F.rms_norm(hidden, hidden.shape[-1:], weight, epsilon)

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
