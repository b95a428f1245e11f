"""A new worker measures a few steps, so that its step cost is right before the first request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.cost.step_cost import PRIOR, StepCost, StepWork, work_of
from core.cost.step_cost_fit import StepCostFit
from core.errors import OutOfDeviceMemory
from core.step import StepOutput, StepPlan
from engine.fake_runner import FakeRunner
from worker.executor import StepExecutor
from worker.warm_up import DECODES, TIME_LIMIT_S, warm_up

FAST = StepCost(step_s=5e-3, sequence_s=1e-3, context_s=1e-7, token_s=2e-4, pair_s=1e-7)
SLOW = StepCost(step_s=0.3, sequence_s=0.02, context_s=1e-5, token_s=0.02, pair_s=1e-5)


class TimedRunner(FakeRunner):
    """A fake runner with a clock that each step moves by its cost."""

    def __init__(self, cost: StepCost, num_blocks: int = 64, error: Exception | None = None) -> None:
        tiny = FakeRunner.from_config(EngineConfig(model="fake:tiny", kv_memory_mb=1))
        super().__init__(tiny.info, tiny.layout, num_blocks)
        self.now = 100.0
        self.steps: list[StepPlan] = []
        self._cost = cost
        self._error = error

    def submit(self, step: StepPlan) -> None:
        self.steps.append(step)
        super().submit(step)

    def collect(self) -> StepOutput:
        if isinstance(self._error, OutOfDeviceMemory):
            failed = {chunk.sequence.sequence_id: self._error for chunk in self.steps[-1].chunks}
            return replace(super().collect(), failed=failed)
        if self._error is not None:
            raise self._error
        cold = 10.0 if len(self.steps) == 1 else 1.0
        self.now += cold * self._cost.seconds(work_of(self.steps[-1].chunks))
        return super().collect()


def warmed(runner: TimedRunner, max_tokens: int = 512) -> StepCost:
    fit, executor = StepCostFit(), StepExecutor(runner)
    try:
        warm_up(executor, fit, runner.layout.block_size, runner.num_blocks, max_tokens, lambda: runner.now)
    finally:
        assert executor.close(5.0)
    return fit.cost


def test_decodes_and_prompts_are_priced_right_before_the_first_request() -> None:
    cost = warmed(TimedRunner(FAST))
    for work in (StepWork(1, 40, 0, 0.0), StepWork(8, 320, 0, 0.0), StepWork(0, 0, 256, 256 * 128.0)):
        assert cost.seconds(work) == pytest.approx(FAST.seconds(work), rel=0.1)


def test_a_slow_worker_skips_the_steps_that_would_end_too_late() -> None:
    runner = TimedRunner(SLOW)
    cost = warmed(runner)
    first_s = 10.0 * SLOW.seconds(work_of(runner.steps[0].chunks))
    assert runner.now - 100.0 < first_s + TIME_LIMIT_S
    assert cost.token_s > 5 * PRIOR.token_s


def test_every_step_writes_each_slot_once_inside_the_pool() -> None:
    runner = TimedRunner(FAST)
    warmed(runner)
    assert max(len(step.chunks) for step in runner.steps) == max(DECODES)
    assert all(chunk.start for step in runner.steps[1:] for chunk in step.chunks), "each attends to a prompt"
    for step in runner.steps:
        slots = [
            (chunk.sequence.block_table[position // runner.layout.block_size], position % runner.layout.block_size)
            for chunk in step.chunks
            for position in range(chunk.start, chunk.start + chunk.num_tokens)
        ]
        assert len(set(slots)) == len(slots)
        assert all(block < runner.num_blocks for block, _ in slots)


@pytest.mark.parametrize("num_blocks", [1, 8, 9, 10, 11, 20])
@pytest.mark.parametrize("max_tokens", [8, 40, 512])
def test_a_small_pool_or_context_shortens_the_warm_up(num_blocks: int, max_tokens: int) -> None:
    runner = TimedRunner(FAST, num_blocks)
    warmed(runner, max_tokens)
    for chunk in (chunk for step in runner.steps for chunk in step.chunks):
        end = chunk.start + chunk.num_tokens
        assert end <= min(len(chunk.sequence.token_ids), max(max_tokens, 33))
        assert len(chunk.sequence.block_table) * runner.layout.block_size >= end
        assert max(chunk.sequence.block_table) < num_blocks


@pytest.mark.parametrize("error", [MemoryError("no memory"), OutOfDeviceMemory("no memory")])
def test_a_step_that_fails_or_a_sequence_without_memory_fails_the_start_of_the_worker(error: Exception) -> None:
    with pytest.raises(type(error), match="no memory"):
        warmed(TimedRunner(FAST, error=error))
