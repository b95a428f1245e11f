"""A table of workers that measures how long the choice of a worker takes. The simulator uses the plain table."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from core.block_hash import PromptHashes
from core.config import RouterConfig
from router.routing.policy import Candidate, SecondsPolicy
from router.routing.workers import WorkerTable


class TimedWorkers(WorkerTable):
    def __init__(self, config: RouterConfig, record_s: Callable[[float], None]) -> None:
        super().__init__(config, SecondsPolicy(config))
        self._record_s = record_s

    def choose(self, prompt: PromptHashes, avoid: frozenset[str], now: float) -> Candidate | None:
        started = perf_counter()
        chosen = super().choose(prompt, avoid, now)
        self._record_s(perf_counter() - started)
        return chosen
