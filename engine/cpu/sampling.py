"""Draws a token from a row of logits with the C kernel: the result of `draw_token`, without a sort."""

from __future__ import annotations

import numpy as np

from core.request import SamplingParams
from engine.cpu.kernels import Kernels


class NativeDraw:
    """A `Draw`. Calls share the scratch memory, so they must not overlap."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._weights = np.empty(0, np.float32)

    def __call__(self, adjusted: np.ndarray, sampling: SamplingParams, key: int, allowed: bytes | None = None) -> int:
        adjusted = np.ascontiguousarray(adjusted, np.float32)
        assert allowed is None or 8 * len(allowed) >= len(adjusted), "the mask ends before the vocabulary"
        if len(self._weights) < len(adjusted):
            self._weights = np.empty(len(adjusted), np.float32)
        token_id: int = self._kernels.draw_token(
            adjusted.ctypes.data,
            allowed,
            len(adjusted),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            key,
            self._weights.ctypes.data,
        )
        return token_id
