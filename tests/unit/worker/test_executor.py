"""StepExecutor computes at most two steps in flight on one thread, in order, and returns one result per step."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.step import ScheduledChunk, SequenceView, StepOutput, StepPlan
from engine.fake_runner import FakeRunner
from engine.step_queue import Computed
from tests.unit.engine.driving import request
from worker.core import Planned
from worker.executor import StepExecutor

DEADLINE_S = 5.0


FAULT = ValueError("out of memory")


class GatedRunner(FakeRunner):
    """A fake runner. Its steps wait for `gate`, and fail while `failing` is true."""

    failing = False

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.collected: list[int] = []
        small = FakeRunner.from_config(EngineConfig(model="fake:tiny", kv_memory_mb=1))
        super().__init__(small.info, small.layout, 8)
        self.started = threading.Event()
        self.gate = threading.Event()
        self.refused: int | None = None  # the id of the step that `submit` refuses

    def submit(self, step: StepPlan) -> None:
        if step.step_id == self.refused:
            raise ValueError("no room for the inputs")
        self.submitted.append(step.step_id)
        super().submit(step)

    def collect(self) -> StepOutput:
        self.started.set()
        assert self.gate.wait(DEADLINE_S)
        output = super().collect()
        self.collected.append(output.step_id)
        return output

    def _compute(self, *inputs: Any) -> Computed:
        if self.failing:
            raise FAULT
        return super()._compute(*inputs)


Result = StepOutput | Exception


class Driven:
    """An executor, and what its callback has received: the result, whether the executor was busy, and the thread."""

    def __init__(self, runner: GatedRunner, cores: Sequence[int] = ()) -> None:
        self.executor = StepExecutor(runner, cores)
        self.received: queue.Queue[tuple[Result, bool, str]] = queue.Queue(maxsize=8)

    def submit(self, step_id: int, planned: Planned = Planned.IDLE) -> None:
        wanted = request("a", range(9))
        view = SequenceView("a", wanted.token_ids, 9, [0], wanted.sampling)
        chunk = ScheduledChunk(view, 0, 9, samples=True, promised=False)
        self.executor.submit(StepPlan(step_id, (chunk,)), planned, self._on_done)

    def _on_done(self, result: Result) -> None:
        self.received.put((result, self.executor.busy, threading.current_thread().name))

    def next(self) -> tuple[Any, bool, str]:
        return self.received.get(timeout=DEADLINE_S)

    def close(self) -> None:
        assert self.executor.close(DEADLINE_S)
        assert self.received.empty()


def test_the_callback_receives_the_output_from_an_idle_executor() -> None:
    runner = GatedRunner()
    driven = Driven(runner)
    driven.submit(-1)
    assert runner.started.wait(DEADLINE_S)
    time.sleep(0.05)
    runner.gate.set()
    assert driven.next()[0].seconds >= 0.05
    for step_id in range(3):
        driven.submit(step_id)
        result, busy, thread = driven.next()
        assert (result.step_id, busy, thread) == (step_id, False, "tandem-engine")
    driven.close()


def test_a_second_step_is_handed_to_the_runner_during_the_first_and_follows_without_the_caller() -> None:
    runner = GatedRunner()
    driven = Driven(runner)
    driven.submit(1)
    assert runner.started.wait(DEADLINE_S)
    driven.submit(2, Planned.AHEAD)
    assert (runner.submitted, runner.collected) == ([1, 2], [])
    with pytest.raises(AssertionError, match="too many steps"):
        driven.submit(3, Planned.AHEAD)
    runner.gate.set()
    assert [(output.step_id, busy) for output, busy, _ in (driven.next(), driven.next())] == [(1, True), (2, False)]
    driven.close()


def test_a_failed_step_drops_the_step_behind_it_and_a_step_planned_before_the_failure_was_known() -> None:
    runner = GatedRunner()
    runner.failing = True
    driven = Driven(runner)
    driven.submit(1)
    driven.submit(2, Planned.AHEAD)
    runner.gate.set()
    assert driven.next()[0] is FAULT
    assert not driven.executor.busy, "the second step is still in flight"
    runner.failing = False
    driven.submit(3, Planned.AHEAD)
    assert runner.submitted == [1, 2], "a step was handed over that counts on the failed step"
    driven.submit(4, Planned.AT_END)
    assert driven.next()[0].step_id == 4
    driven.close()
    assert runner.collected == [4]


def test_a_step_that_the_runner_refuses_fails_after_the_step_before_has_ended() -> None:
    runner = GatedRunner()
    runner.refused = 2
    driven = Driven(runner)
    driven.submit(1)
    driven.submit(2, Planned.AHEAD)
    runner.gate.set()
    assert [type(driven.next()[0]) for _ in range(2)] == [StepOutput, ValueError]
    driven.close()
    assert runner.submitted == [1]


def test_a_wait_for_work_does_not_count_as_idle_time_between_steps() -> None:
    runner = GatedRunner()
    runner.gate.set()
    driven = Driven(runner)
    executor = driven.executor
    for step_id, planned in enumerate([Planned.IDLE, Planned.IDLE, Planned.AT_END]):
        idle_before, computed_before = executor.idle_seconds, executor.step_seconds
        driven.submit(step_id, planned)
        driven.next()
        assert (executor.idle_seconds > idle_before) == (planned is Planned.AT_END)
        assert executor.step_seconds > computed_before
    driven.close()


def test_close_waits_for_the_running_step_up_to_its_time_limit() -> None:
    runner = GatedRunner()
    driven = Driven(runner)
    driven.submit(1)
    assert runner.started.wait(DEADLINE_S)
    assert not driven.executor.close(0.02), "close returned True during a step"
    runner.gate.set()
    assert driven.executor.close(DEADLINE_S)
    assert isinstance(driven.received.get_nowait()[0], StepOutput)
    with pytest.raises(AssertionError, match="closed"):
        driven.submit(2)


class ComputingRunner(GatedRunner):
    """Its step starts compute threads of torch, and records the cores that they may use."""

    allowed: frozenset[frozenset[int]]

    def collect(self) -> StepOutput:
        before = set(os.listdir("/proc/self/task"))
        torch.set_num_threads(3)
        torch.randn(512, 512) @ torch.randn(512, 512)
        made = set(os.listdir("/proc/self/task")) - before
        threads = [*map(int, made), threading.get_native_id()]
        self.allowed = frozenset(frozenset(os.sched_getaffinity(thread)) for thread in threads)
        self.num_made = len(made)
        return super().collect()


def test_the_thread_of_the_executor_and_its_compute_threads_stay_on_the_given_cores() -> None:
    runner, everything, num_threads = ComputingRunner(), os.sched_getaffinity(0), torch.get_num_threads()
    core = max(everything)
    driven = Driven(runner, [core])
    runner.gate.set()
    try:
        driven.submit(0)
        driven.next()
    finally:
        driven.close()
        torch.set_num_threads(num_threads)
    assert runner.num_made >= 2, "torch started no compute threads, so this test proves nothing"
    assert runner.allowed == {frozenset({core})}
    assert os.sched_getaffinity(0) == everything, "the submitting thread was pinned"
