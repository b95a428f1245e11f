"""Rotary position embedding, half-split: element d of a head is rotated with element d + D / 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's rows, shared by all layers and heads."""

    cosine: torch.Tensor  # float32 [T, D / 2]
    sine: torch.Tensor  # float32 [T, D / 2]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """# [T, heads, D] -> [T, heads, D]"""
        cosine, sine = self.cosine.to(heads.dtype)[:, None], self.sine.to(heads.dtype)[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class RotaryTable:
    """The angles of all positions, made once: then a step looks up its rows, and computes no cosine."""

    def __init__(self, inverse_frequencies: torch.Tensor, num_positions: int) -> None:
        """# inverse_frequencies: float32 [D / 2]"""
        places = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
        angles = places[:, None] * inverse_frequencies
        self.cosine, self.sine = angles.cos(), angles.sin()  # float32 [num_positions, D / 2]

    def rows(self, positions: np.ndarray) -> Rotation:
        """# int32 [T]"""
        if self.cosine.is_cuda:
            rows = torch.from_numpy(positions).to(self.cosine.device)
            return Rotation(self.cosine.index_select(0, rows), self.sine.index_select(0, rows))
        # numpy looks up on the calling thread; torch would start compute threads for it.
        cosine, sine = (table.numpy().take(positions, axis=0) for table in (self.cosine, self.sine))
        return Rotation(torch.from_numpy(cosine), torch.from_numpy(sine))
