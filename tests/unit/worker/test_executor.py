"""StepExecutor computes at most two steps in flight on one thread, in order, and returns one result per step."""

from __future__ import annotations

import os
import queue
import threading
import time
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


class GatedRunner(FakeRunner):
    """A fake runner. Its steps wait for `gate`."""

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


FAULT = ValueError("out of memory")


class FailingRunner(GatedRunner):
    """Its steps fail while `failing` is true."""

    failing = False

    def _compute(self, *inputs: Any) -> Computed:
        if self.failing:
            raise FAULT
        return super()._compute(*inputs)


def plan(step_id: int) -> StepPlan:
    wanted = request("a", range(9))
    chunk = ScheduledChunk(
        SequenceView("a", wanted.token_ids, 9, [0], wanted.sampling), 0, 9, samples=True, promised=False
    )
    return StepPlan(step_id, (chunk,))


def test_the_callback_receives_the_output_from_an_idle_executor() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    seen: queue.Queue[tuple[StepOutput | Exception, bool, str]] = queue.Queue(maxsize=8)

    def on_done(result: StepOutput | Exception) -> None:
        seen.put((result, executor.busy, threading.current_thread().name))

    executor.submit(plan(-1), Planned.IDLE, on_done)
    assert runner.started.wait(DEADLINE_S)
    time.sleep(0.05)
    runner.gate.set()
    slow, _, _ = seen.get(timeout=DEADLINE_S)
    assert isinstance(slow, StepOutput)
    assert slow.seconds is not None
    assert slow.seconds >= 0.05
    for step_id in range(3):
        executor.submit(plan(step_id), Planned.IDLE, on_done)
        result, busy, thread = seen.get(timeout=DEADLINE_S)
        assert isinstance(result, StepOutput)
        assert result.step_id == step_id
        assert not busy
        assert thread == "tandem-engine"
    assert executor.close(DEADLINE_S)
    assert seen.empty()


def test_a_second_step_is_handed_to_the_runner_during_the_first_and_follows_without_the_caller() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    seen: queue.Queue[tuple[StepOutput | Exception, bool]] = queue.Queue(maxsize=8)

    def on_done(result: StepOutput | Exception) -> None:
        seen.put((result, executor.busy))

    executor.submit(plan(1), Planned.IDLE, on_done)
    assert runner.started.wait(DEADLINE_S)
    executor.submit(plan(2), Planned.AHEAD, on_done)
    assert runner.submitted == [1, 2]
    assert runner.collected == []
    with pytest.raises(AssertionError, match="too many steps"):
        executor.submit(plan(3), Planned.AHEAD, on_done)
    runner.gate.set()
    outputs = [seen.get(timeout=DEADLINE_S) for _ in range(2)]
    assert [(output.step_id, busy) for output, busy in outputs if isinstance(output, StepOutput)] == [
        (1, True),
        (2, False),
    ]
    assert executor.close(DEADLINE_S)


def test_a_failed_step_drops_the_step_behind_it_and_a_step_planned_before_the_failure_was_known() -> None:
    runner = FailingRunner()
    runner.failing = True
    executor = StepExecutor(runner)
    seen: queue.Queue[StepOutput | Exception] = queue.Queue(maxsize=8)
    executor.submit(plan(1), Planned.IDLE, seen.put)
    executor.submit(plan(2), Planned.AHEAD, seen.put)
    runner.gate.set()
    assert seen.get(timeout=DEADLINE_S) is FAULT
    assert not executor.busy, "the second step is still in flight"
    runner.failing = False
    executor.submit(plan(3), Planned.AHEAD, seen.put)
    assert runner.submitted == [1, 2], "a step was handed over that counts on the failed step"
    executor.submit(plan(4), Planned.AT_END, seen.put)
    output = seen.get(timeout=DEADLINE_S)
    assert isinstance(output, StepOutput)
    assert output.step_id == 4
    assert executor.close(DEADLINE_S)
    assert runner.collected == [4]
    assert seen.empty()


def test_a_step_that_the_runner_refuses_fails_after_the_step_before_has_ended() -> None:
    runner = GatedRunner()
    runner.refused = 2
    executor = StepExecutor(runner)
    seen: queue.Queue[StepOutput | Exception] = queue.Queue(maxsize=8)
    executor.submit(plan(1), Planned.IDLE, seen.put)
    executor.submit(plan(2), Planned.AHEAD, seen.put)
    runner.gate.set()
    assert isinstance(seen.get(timeout=DEADLINE_S), StepOutput)
    assert isinstance(seen.get(timeout=DEADLINE_S), ValueError)
    assert executor.close(DEADLINE_S)
    assert runner.submitted == [1]


def test_a_wait_for_work_does_not_count_as_idle_time_between_steps() -> None:
    runner = GatedRunner()
    runner.gate.set()
    executor = StepExecutor(runner)
    for step_id, planned in enumerate([Planned.IDLE, Planned.IDLE, Planned.AT_END]):
        done = threading.Event()
        idle_before, computed_before = executor.idle_seconds, executor.step_seconds
        executor.submit(plan(step_id), planned, lambda _result, done=done: done.set())  # type: ignore[misc]
        assert done.wait(DEADLINE_S)
        assert (executor.idle_seconds > idle_before) == (planned is Planned.AT_END)
        assert executor.step_seconds > computed_before
    assert executor.close(DEADLINE_S)


def test_close_waits_for_the_running_step_up_to_its_time_limit() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    seen: queue.Queue[StepOutput | Exception] = queue.Queue(maxsize=8)
    executor.submit(plan(1), Planned.IDLE, seen.put)
    assert runner.started.wait(DEADLINE_S)
    assert not executor.close(0.02), "close returned True during a step"
    runner.gate.set()
    assert executor.close(DEADLINE_S)
    assert isinstance(seen.get_nowait(), StepOutput)
    with pytest.raises(AssertionError, match="closed"):
        executor.submit(plan(2), Planned.IDLE, seen.put)


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
    executor = StepExecutor(runner, [core])
    done = threading.Event()
    runner.gate.set()
    try:
        executor.submit(plan(0), Planned.IDLE, lambda _result: done.set())
        assert done.wait(DEADLINE_S)
    finally:
        assert executor.close(DEADLINE_S)
        torch.set_num_threads(num_threads)
    assert runner.num_made >= 2, "torch started no compute threads, so this test proves nothing"
    assert runner.allowed == {frozenset({core})}
    assert os.sched_getaffinity(0) == everything, "the submitting thread was pinned"
