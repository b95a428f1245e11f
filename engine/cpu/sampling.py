"""Draws a token from a row of logits with the C kernel: the result of `draw_token`, without sorting the vocabulary."""

from __future__ import annotations

import numpy as np

from core.request import SamplingParams
from engine.cpu.kernels import Kernels


class NativeDraw:
    """A `Draw`. Calls share the scratch memory, so they must not overlap."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._scratch = np.empty(0, np.uint8)

    def __call__(self, adjusted: np.ndarray, sampling: SamplingParams, draw: float) -> int:
        adjusted = np.ascontiguousarray(adjusted, np.float32)
        num_bytes = self._kernels.draw_scratch_bytes(len(adjusted))
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        token_id: int = self._kernels.draw_token(
            adjusted.ctypes.data,
            len(adjusted),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            draw,
            self._scratch.ctypes.data,
        )
        return token_id
