"""The report of a worker about its speed and its work: the fitted cost, the decodes, the backlog, the freed blocks."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.scheduling.worker_load import size_class
from tests.support.worker_words import WorkerReplay
from worker.reported_load import REPORTED_CHANGE, ReportedCost

STEP_S = 0.1


def scaled(cost: StepCost, factor: float) -> StepCost:
    return StepCost(*(value * factor for value in astuple(cost)))


def test_every_step_teaches_the_cost_that_the_scheduler_and_the_report_use() -> None:
    worker = WorkerReplay("decode")
    assert worker.machine.load().step_cost == PRIOR
    worker.arrive("a", 6, max=12)
    while worker.plans:
        worker.now += STEP_S
        worker.step()
    fitted = worker.machine.load().step_cost
    assert fitted.seconds(StepWork(1, 10, 0, 0.0)) == pytest.approx(STEP_S, rel=0.05)
    assert worker.core.scheduler.step_cost == fitted


def test_a_step_planned_ahead_lasts_from_the_end_of_the_step_before() -> None:
    worker = WorkerReplay("decode ahead=1")
    worker.arrive("a", 6, max=40)
    for _ in range(30):
        worker.wait(STEP_S)
        worker.step()
    assert worker.core.scheduler.num_steps_in_flight > 0
    assert worker.machine.load().step_cost.seconds(StepWork(1, 20, 0, 0.0)) == pytest.approx(STEP_S, rel=0.05)


def test_a_failed_step_teaches_nothing() -> None:
    worker = WorkerReplay("decode")
    worker.arrive("a", 6)
    worker.now += 30.0
    worker.fail_step()
    assert worker.machine.load().step_cost == PRIOR


def test_small_changes_add_up_to_one_that_is_reported() -> None:
    reported = ReportedCost(PRIOR)
    costs = [scaled(PRIOR, 1.0 + step * 0.3 * REPORTED_CHANGE) for step in range(1, 5)]
    assert [reported.update(cost) for cost in costs] == [PRIOR] * 3 + [costs[-1]]


def test_sequences_in_decode_are_counted_with_the_tokens_that_they_attend_to() -> None:
    worker = WorkerReplay("decode")
    worker.arrive("a", 5, max=12)
    worker.arrive("b", 15, first=30)
    assert worker.machine.load().num_decoding == 0, "both are in prefill"
    worker.step()
    load = worker.machine.load()
    assert (load.num_decoding, load.decode_context) == (1, 5)
    for _ in range(3):
        worker.step()
    load = worker.machine.load()
    assert (load.num_decoding, load.decode_context) == (2, 8 + 15)


def test_a_prompt_that_a_prefill_worker_has_computed_is_no_sequence_in_decode() -> None:
    worker = WorkerReplay("prefill")
    worker.arrive("a", 9)  # a chunk of 8 tokens, and a token that looks like a decode
    assert worker.line("step") == ["step", "  -> step a 8+1", "  -> digests 2"]
    assert worker.machine.load().num_decoding == 0


def test_the_backlog_has_the_seconds_of_each_prompt_in_the_class_of_its_own_size() -> None:
    worker = WorkerReplay("decode blocks=64")
    assert worker.machine.load().prompt_backlog == ()
    worker.arrive("long", 60)
    worker.arrive("short", 7, first=200)
    backlog = worker.machine.load().prompt_backlog
    long_s, short_s = PRIOR.prompt_seconds(60), PRIOR.prompt_seconds(7)
    assert len(backlog) == size_class(long_s) + 1
    assert backlog[-1] == pytest.approx(long_s)
    assert backlog[size_class(short_s)] == pytest.approx(short_s)
    assert sum(backlog) == pytest.approx(long_s + short_s)


def test_blocks_of_an_ended_sequence_are_counted_as_released() -> None:
    worker = WorkerReplay("decode")
    worker.arrive("a", 6, max=12)
    worker.step()
    held = worker.ledger["held"]
    assert worker.machine.load().num_released_blocks == 0
    worker.step(a=63)
    assert worker.machine.load().num_released_blocks == held > 0
