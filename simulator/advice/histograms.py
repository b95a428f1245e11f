"""A load from what a metrics server keeps of a running fleet: two histograms of lengths, and sums.

The server does not keep which prompt had which output, when the requests came, and which prompts hit the cache. So the
lengths of prompts and outputs are independent, requests come by a Poisson process, without the bursts of the real ones,
and each prompt hits the cache by the same share.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.advice.goodput import Load
from simulator.advice.pools import Job
from simulator.replay.trace_rows import MAX_TOKENS

LEAST_BOUND, LARGEST = 1e-3, 2.0**53  # of bounds and counts: a larger one is not exact
LEAST_MEAN = 0.5  # tokens: what a length of 1 is rounded from


@dataclass(frozen=True, slots=True)
class Histogram:
    """Of a length in tokens, as Prometheus has it: requests up to each bound, by rising bound.

    Raises `ValueError` unless the bounds rise from above 0, the counts never fall, the last is above 0, and the mean is
    a length. The last bound may be infinite; what lies beyond the one before it is taken to be that long.
    """

    name: str
    bounds: Sequence[float]
    counts: Sequence[float]
    total: float  # sum of all lengths

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip((0.0, *self.bounds), self.bounds, strict=False))
        falling = any(low > high for low, high in zip((0.0, *self.counts), self.counts, strict=False))
        if not self.bounds or not rising or falling or len(self.bounds) != len(self.counts):
            raise ValueError(f"{self.name} is no histogram: bounds must rise from above 0, and counts never fall")
        if math.isinf(self.bounds[0]):
            raise ValueError(f"{self.name} has no finite bound")
        largest = next(bound for bound in reversed(self.bounds) if bound < math.inf)
        if not self.bounds[0] >= LEAST_BOUND or not max(largest, self.num_requests) <= LARGEST:
            raise ValueError(
                f"{self.name} must have bounds in [{LEAST_BOUND:g}, {LARGEST:g}] and counts up to there, has bounds of "
                f"{self.bounds[0]:g} to {largest:g} and {self.num_requests:g} requests"
            )
        if not self.num_requests or not LEAST_MEAN <= self.total / self.num_requests <= MAX_TOKENS:
            raise ValueError(
                f"{self.name} has {self.num_requests:g} requests with {self.total:g} tokens: their mean must be in "
                f"[{LEAST_MEAN:g}, {MAX_TOKENS:,}]"
            )

    @property
    def num_requests(self) -> float:
        return self.counts[-1]

    def lengths(self, num: int) -> list[int]:
        """`num` lengths, evenly over the requests, of the mean that the server knows: within a bucket they are evenly
        spread, and then all are multiplied alike."""
        drawn = [self._quantile((index + 0.5) / num) for index in range(num)]
        scale = self.total / self.num_requests / (sum(drawn) / num)
        return [min(MAX_TOKENS, max(1, round(length * scale))) for length in drawn]

    def _quantile(self, share: float) -> float:
        rank = share * self.num_requests
        bucket = bisect_left(self.counts, rank)
        low, below = (self.bounds[bucket - 1], self.counts[bucket - 1]) if bucket else (0.0, 0.0)
        if math.isinf(self.bounds[bucket]):
            return low
        return low + (self.bounds[bucket] - low) * (rank - below) / (self.counts[bucket] - below)


def load_of_histograms(
    name: str, prompts: Histogram, outputs: Histogram, hit_share: float, window_s: float, num: int
) -> Load:
    """`hit_share`: of the prompt tokens, those that the cache had. `window_s`: the time that the histograms are of."""
    shuffled = outputs.lengths(num)
    random.Random("outputs of prompts").shuffle(shuffled)
    hits = min(1.0, max(0.0, hit_share))
    jobs = [
        Job(prompt, min(prompt - 1, int(prompt * hits)), output)
        for prompt, output in zip(prompts.lengths(num), shuffled, strict=True)
    ]
    return Load(name, jobs, (), prompts.num_requests / window_s)
