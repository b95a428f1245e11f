"""Lets a test slow down, hold back or break the steps of a worker."""

from __future__ import annotations

import threading
import time
from typing import Any

from core.step import StepOutput


def runner_of(worker: Any) -> Any:
    """The runner of a worker service that has started."""
    return worker._parts.executor._runner


def slow_down(worker: Any, step_s: float) -> None:
    """Make every step take `step_s` longer."""
    runner = runner_of(worker)
    collect = runner.collect

    def slow() -> StepOutput:
        time.sleep(step_s)
        output: StepOutput = collect()
        return output

    runner.collect = slow


class Gate:
    """Steps of a worker wait while the gate is closed. The gate starts open."""

    def __init__(self, worker: Any) -> None:
        runner = runner_of(worker)
        self._collect, runner.collect = runner.collect, self._pass
        self._open = threading.Event()
        self._open.set()
        self._passes = 0
        self.waiting = False

    def _pass(self) -> StepOutput:
        if self._passes:
            self._passes -= 1
        else:
            self.waiting = True
            assert self._open.wait(30), "the gate stayed closed for 30 s"
            self.waiting = False
        output: StepOutput = self._collect()
        return output

    def close(self, after: int = 0) -> None:
        """Let `after` more steps pass, then none."""
        self._passes = after
        self._open.clear()

    def open(self) -> None:
        self._open.set()
