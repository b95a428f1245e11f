"""Draws a token from a row of logits with numpy: the result of `draw_token`, without a sort.

    the token with the best score --> kept by top_k, top_p and min_p? --> drawn
              ^                                  | no: neither is any token behind it
              +--- of the tokens before it ------+

A filter keeps the tokens down to a place in descending order. A token that a filter drops leaves a random share of the
mass to draw from, so few rounds suffice. Weights in float32 leave few tokens that may win, and these get the exact
scores of the law. A token so close to the border of top_p that such weights do not decide is left to the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from core.request import SamplingParams
from engine.sampling import draw_token, masked, scores_of, scramble

_ROUNDING = 2e-5  # of a mass of weights in float32; 5e-6 are possible


class QuickDraw:
    """A `Draw`. Calls share the scratch memory, so they must not overlap."""

    def __init__(self) -> None:
        self._grow(0)

    def _grow(self, size: int) -> None:
        self._token_ids, self._bits = np.arange(size, dtype=np.uint32), np.empty(size, np.uint32)
        self._weights, self._ratios, self._spare = np.empty((3, size), np.float32)

    def __call__(self, adjusted: np.ndarray, sampling: SamplingParams, key: int, allowed: bytes | None = None) -> int:
        """# float32 [vocab]"""
        if allowed is not None:
            adjusted = masked(adjusted, allowed)
        highest = adjusted.max()
        if not np.isfinite(highest):
            return draw_token(adjusted, sampling, key)
        if len(self._token_ids) < len(adjusted):
            self._grow(len(adjusted))
        token_ids: np.ndarray = self._token_ids[: len(adjusted)]
        logits = adjusted
        least = _least_logit(adjusted, sampling, float(highest))
        if least is not None:
            token_ids = np.flatnonzero(adjusted >= least)
            logits = adjusted[token_ids]
        size = len(logits)
        weights, ratios, spare = self._weights[:size], self._ratios[:size], self._spare[:size]
        row = _Row(token_ids, logits, highest, weights, ratios, spare, sampling, key)
        row.weigh(self._bits[:size])
        drawn = row.draw()
        return draw_token(adjusted, sampling, key) if drawn is None else drawn


def _least_logit(adjusted: np.ndarray, sampling: SamplingParams, highest: float) -> float | None:
    """No filter keeps a token below; None: not known. top_p alone needs the mass of these tokens, too."""
    size, temperature = len(adjusted), sampling.temperature
    if 0 < sampling.top_k < size:
        return float(np.partition(adjusted, size - sampling.top_k)[size - sampling.top_k])
    if sampling.min_p == 0.0 or sampling.top_p < 1.0:
        return None
    below = -temperature * math.log(sampling.min_p)
    return highest - below - 1e-6 * (abs(highest) + below + temperature)  # the comparison is in float32


@dataclass(slots=True)
class _Row:
    """The tokens that may be drawn, the lowest id first. The one with the least exponential / weight is drawn."""

    token_ids: np.ndarray  # int [n]
    logits: np.ndarray  # float32 [n]
    highest: np.float32
    weights: np.ndarray  # float32 [n]
    ratios: np.ndarray  # float32 [n]; infinite for a token that a filter drops
    spare: np.ndarray  # float32 [n]
    sampling: SamplingParams
    key: int

    def weigh(self, bits: np.ndarray) -> None:
        """# uint32 [n] scratch"""
        np.subtract(self.logits, self.highest, out=self.weights)
        self.weights /= self.sampling.temperature
        np.exp(self.weights, out=self.weights)
        bits[:] = self.token_ids
        scramble(bits, self.key, self.spare.view(np.uint32))
        self.ratios[:] = bits
        self.ratios += 0.5
        with np.errstate(divide="ignore", over="ignore"):  # a token without weight is not drawn
            self.ratios /= self.weights

    def draw(self) -> int | None:
        """None if the rounding of the weights does not decide."""
        sampling, logits, top_k = self.sampling, self.logits, self.sampling.top_k
        border = sampling.top_p * self._mass_of_top_k() if sampling.top_p < 1.0 else math.inf
        while True:
            place, weight = self._winner()
            if not top_k and sampling.top_p == 1.0 and sampling.min_p == 0.0:
                return int(self.token_ids[place])
            is_before = logits > logits[place]
            is_before[:place] |= logits[:place] == logits[place]
            num_before = np.count_nonzero(is_before)
            stays = weight >= sampling.min_p and not 0 < top_k <= num_before
            if stays and sampling.top_p < 1.0 and num_before:
                mass_before = np.multiply(self.weights, is_before, out=self.spare).sum(dtype=np.float64)
                if abs(mass_before - border) <= _ROUNDING * border:
                    return None
                stays = bool(mass_before < border)
            if stays:
                return int(self.token_ids[place])
            self.ratios[~is_before] = np.inf

    def _mass_of_top_k(self) -> float:
        """Of all tokens without top_k. Else the lightest tokens are equals, and some of them may be too many."""
        num_dropped = max(0, len(self.logits) - self.sampling.top_k) if self.sampling.top_k else 0
        return float(self.weights.sum(dtype=np.float64) - num_dropped * self.weights.min())

    def _winner(self) -> tuple[int, float]:
        """The place of the token with the best score, and its exact weight."""
        _, scores = self._exact(self.ratios.argmin(axis=0, keepdims=True))
        # An exponential variate is at least its quantile, so a token with a larger ratio does not win against this one.
        contenders = np.flatnonzero(self.ratios <= 1.001 * 2.0**32 * math.exp(-scores[0]))
        weights, scores = self._exact(contenders)
        best = scores.argmax()
        return int(contenders[best]), float(weights[best])

    def _exact(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights and scores, as the law has them."""
        weights = np.exp((self.logits[places].astype(np.float64) - self.highest) / self.sampling.temperature)
        return weights, scores_of(weights, self.key, self.token_ids[places])
