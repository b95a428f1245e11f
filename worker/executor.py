"""A thread that runs the steps of a Runner, so that the event loop never waits for a step.

    IDLE --submit--> BUSY --callback--> IDLE        close: CLOSED, once the step in flight has ended

One step runs at a time; a second `submit` during a step is a bug of the caller. The executor's thread calls the
callback with the output of the step, or with the exception that ended the step. An asyncio caller hands both to its
loop with call_soon_threadsafe. The thread pins itself before its first step, and so pins every compute thread that the
runner's libraries start from it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from core.step import StepOutput, StepPlan
from engine.runner import Runner, run_step

StepDone = Callable[[StepOutput | Exception], None]


class StepExecutor:
    def __init__(self, runner: Runner, cores: Sequence[int] = (), name: str = "tandem-engine") -> None:
        self._runner = runner
        self._cores = cores  # empty = every core that the process may use
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False
        self._work: queue.SimpleQueue[tuple[StepPlan, StepDone] | None] = queue.SimpleQueue()  # a step; None ends
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._busy

    def submit(self, plan: StepPlan, on_done: StepDone) -> None:
        """Run `plan`, then call `on_done` once, with the output or the exception. The executor is idle by then."""
        with self._lock:
            assert not self._closed, "the executor is closed"
            assert not self._busy, "one step at a time"
            self._busy = True
            self._work.put((plan, on_done))

    def close(self, timeout_s: float) -> bool:
        """Refuse new steps and wait for the step in flight. Returns False if it has not ended after `timeout_s`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        pin_thread(self._cores)
        while (item := self._work.get()) is not None:
            plan, on_done = item
            result: StepOutput | Exception
            try:
                result = run_step(self._runner, plan)
            except Exception as error:  # noqa: BLE001 - `on_done` gets every exception
                result = error
            with self._lock:
                self._busy = False
            on_done(result)


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
