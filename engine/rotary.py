"""Rotary position embedding, half-split: element d of a head is rotated with element d + D / 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's rows, shared by all layers and heads."""

    cosine: torch.Tensor  # float32 [T, D / 2]
    sine: torch.Tensor  # float32 [T, D / 2]

    @classmethod
    def of(cls, positions: Sequence[int], inverse_frequencies: torch.Tensor) -> Rotation:
        """# inverse_frequencies: float32 [D / 2]"""
        places = torch.tensor(positions, dtype=torch.float32, device=inverse_frequencies.device)
        angles = places[:, None] * inverse_frequencies
        return cls(angles.cos(), angles.sin())

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """# [T, heads, D] -> [T, heads, D]"""
        cosine, sine = self.cosine.to(heads.dtype)[:, None], self.sine.to(heads.dtype)[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
