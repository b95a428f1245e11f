"""A thread that computes the steps of a Runner, so that the event loop never waits for a step.

    event loop       submit(k)    submit(k + 1)                  submit(k + 2)
    engine thread            |---- collect k ----| on_done |---- collect k + 1 ----| on_done |---

At most two steps are in flight, so the engine thread goes from one step to the next without the event loop. The
caller's thread hands each step to the runner, which then prepares the inputs: a millisecond of Python and numpy at
most. A third thread would share the interpreter with the event loop, and steps would start one thread switch later.

If a step fails, the step behind it is dropped: the exception of the failed step answers for both. A step that was
planned ahead before its planner knew of the failure is dropped, too.

The engine thread calls `on_done` with the output of the step and its duration, or with the exception that ended the
step. An asyncio caller hands both to its loop with call_soon_threadsafe. The thread pins itself before its first step,
and so pins every compute thread that the runner's libraries start from it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from core.scheduling.scheduler import MAX_STEPS_IN_FLIGHT
from core.step import StepOutput, StepPlan
from engine.runner import Runner
from worker.core import Planned

StepDone = Callable[[StepOutput | Exception], None]


class _Work(NamedTuple):
    planned: Planned
    on_done: StepDone
    refused: Exception | None  # by the runner's `submit`; such a step has nothing to collect


class StepExecutor:
    """`step_seconds`: time in steps. `idle_seconds`: time between steps while there was work. Both since the start."""

    def __init__(self, runner: Runner, cores: Sequence[int] = (), name: str = "tandem-engine") -> None:
        self.step_seconds = self.idle_seconds = 0.0
        self._runner = runner
        self._cores = cores  # empty = every core that the process may use
        self._lock = threading.Lock()  # held while a step is handed to the runner, and while a failure drops steps
        self._num_submitted = 0  # written by the submitting thread only
        self._num_ended = 0  # written by the engine thread only
        self._failed = False  # the newest step failed or was dropped
        self._closed = False
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # handed to the runner; None ends the thread
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._num_submitted > self._num_ended

    def submit(self, plan: StepPlan, planned: Planned, on_done: StepDone) -> None:
        """Compute `plan` after the step in flight, then call `on_done` with the output or the exception.

        `on_done` is called once. It is not called if the step is dropped.
        """
        with self._lock:
            assert not self._closed, "the executor is closed"
            if planned is Planned.AHEAD and self._failed:
                return
            assert self._num_submitted - self._num_ended < MAX_STEPS_IN_FLIGHT, "too many steps in flight"
            self._failed = False
            self._num_submitted += 1
            refused = None
            try:
                self._runner.submit(plan)
            except Exception as error:  # noqa: BLE001 - `on_done` gets every exception, after the step before has ended
                refused = error
            self._work.put(_Work(planned, on_done, refused))

    def close(self, timeout_s: float) -> bool:
        """Refuse new steps and wait for the steps in flight. Returns False if they have not ended after `timeout_s`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        pin_thread(self._cores)
        ended_at = time.monotonic()
        while (work := self._work.get()) is not None:
            started_at = time.monotonic()
            if work.planned is not Planned.IDLE:
                self.idle_seconds += started_at - ended_at
            result = self._collect(work)
            ended_at = time.monotonic()
            self.step_seconds += ended_at - started_at
            if isinstance(result, StepOutput):
                result = replace(result, seconds=ended_at - started_at)
            work.on_done(result)

    def _collect(self, work: _Work) -> StepOutput | Exception:
        result: StepOutput | Exception
        try:
            if work.refused is not None:
                raise work.refused
            result = self._runner.collect()
        except Exception as error:  # noqa: BLE001
            result = error
            with self._lock:
                self._failed = True
                self._drop_next()
        self._num_ended += 1
        return result

    def _drop_next(self) -> None:
        """Let the runner end the step behind a failed one, before the caller gets the failure and reuses blocks."""
        with contextlib.suppress(queue.Empty):
            work = self._work.get_nowait()
            if work is None:
                self._work.put(None)  # for `_loop`
                return
            if work.refused is None:
                with contextlib.suppress(Exception):
                    self._runner.collect()
            self._num_ended += 1


def pin_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread, and every thread it starts later, on `cores`. Empty `cores` change nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin the calling thread inside the `with` block, and restore its cores afterwards."""
    before = os.sched_getaffinity(0)
    pin_thread(cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
