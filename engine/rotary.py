"""Rotary position embedding, half-split: element d of a head is rotated with element d + D / 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_ROWS_AT_ONCE = 256  # small enough for torch to compute on the calling thread alone


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's rows, shared by all layers and heads."""

    cosine: torch.Tensor  # float32 [T, D / 2]
    sine: torch.Tensor  # float32 [T, D / 2]

    @classmethod
    def of(cls, positions: np.ndarray, inverse_frequencies: torch.Tensor) -> Rotation:
        """# positions: [T], inverse_frequencies: float32 [D / 2]"""
        places = torch.from_numpy(positions.astype(np.float32)).to(inverse_frequencies.device)
        cosine, sine = (places.new_empty((len(places), len(inverse_frequencies))) for _ in range(2))
        for first in range(0, len(places), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            angles = places[rows, None] * inverse_frequencies
            torch.cos(angles, out=cosine[rows])
            torch.sin(angles, out=sine[rows])
        return cls(cosine, sine)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """# [T, heads, D] -> [T, heads, D]"""
        cosine, sine = self.cosine.to(heads.dtype)[:, None], self.sine.to(heads.dtype)[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
