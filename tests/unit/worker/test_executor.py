"""StepExecutor runs one step at a time on one thread, and returns one result per step."""

from __future__ import annotations

import os
import queue
import threading

import pytest
import torch

from core.config import EngineConfig
from core.step import ScheduledChunk, SequenceView, StepOutput, StepPlan
from engine.fake_runner import FakeRunner
from tests.unit.engine.driving import request
from worker.executor import StepExecutor

DEADLINE_S = 5.0


class GatedRunner(FakeRunner):
    """A fake runner. Its step waits for `gate`, and then raises `fault` if there is one."""

    def __init__(self) -> None:
        small = FakeRunner.from_config(EngineConfig(model="fake:tiny", kv_memory_mb=1))
        super().__init__(small.info, small.layout, 8)
        self.started = threading.Event()
        self.gate = threading.Event()
        self.fault: Exception | None = None

    def collect(self) -> StepOutput:
        self.started.set()
        assert self.gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        return super().collect()


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

    runner.gate.set()
    for step_id in range(3):
        executor.submit(plan(step_id), on_done)
        result, busy, thread = seen.get(timeout=DEADLINE_S)
        assert isinstance(result, StepOutput)
        assert result.step_id == step_id
        assert not busy
        assert thread == "tandem-engine"
    assert executor.close(DEADLINE_S)
    assert seen.empty()


def test_a_failed_step_returns_its_exception_and_the_next_step_runs() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    seen: queue.Queue[StepOutput | Exception] = queue.Queue(maxsize=8)
    runner.gate.set()
    runner.fault = ValueError("out of memory")
    executor.submit(plan(1), seen.put)
    assert seen.get(timeout=DEADLINE_S) is runner.fault
    runner.fault = None
    executor.submit(plan(2), seen.put)
    assert isinstance(seen.get(timeout=DEADLINE_S), StepOutput)
    assert executor.close(DEADLINE_S)


def test_a_second_step_during_the_first_is_an_assertion_error() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    executor.submit(plan(1), lambda _: None)
    assert executor.busy
    with pytest.raises(AssertionError, match="one step at a time"):
        executor.submit(plan(2), lambda _: None)
    runner.gate.set()
    assert executor.close(DEADLINE_S)


def test_close_waits_for_the_running_step_up_to_its_time_limit() -> None:
    runner = GatedRunner()
    executor = StepExecutor(runner)
    seen: queue.Queue[StepOutput | Exception] = queue.Queue(maxsize=8)
    executor.submit(plan(1), seen.put)
    assert runner.started.wait(DEADLINE_S)
    assert not executor.close(0.02), "close returned True during a step"
    runner.gate.set()
    assert executor.close(DEADLINE_S)
    assert isinstance(seen.get_nowait(), StepOutput)
    with pytest.raises(AssertionError, match="closed"):
        executor.submit(plan(2), seen.put)


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
        executor.submit(plan(0), lambda _result: done.set())
        assert done.wait(DEADLINE_S)
    finally:
        assert executor.close(DEADLINE_S)
        torch.set_num_threads(num_threads)
    assert runner.num_made >= 2, "torch started no compute threads, so this test proves nothing"
    assert runner.allowed == {frozenset({core})}
    assert os.sched_getaffinity(0) == everything, "the submitting thread was pinned"
