"""Measures routing decisions. The machine reads no clock, so the shell gives it this context manager."""

from __future__ import annotations

from time import perf_counter

from runtime.prometheus.metric_series import Buckets


class DecisionTimer:
    def __init__(self) -> None:
        self.durations = Buckets(())  # of the metric, once the shell has it
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.durations.observe(perf_counter() - self._started)
