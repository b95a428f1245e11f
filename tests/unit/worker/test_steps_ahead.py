"""When a worker plans the next step, and what becomes of that step when the step in flight turns out otherwise."""

from __future__ import annotations

import pytest

from core.cost.step_cost import StepWork
from core.errors import OutOfDeviceMemory, TandemError
from core.machine import Tick
from decode_worker.events import DecodeFailed
from prefill_worker.machine import PrefillDone
from tests.support.driven_worker import request
from tests.unit.decode_worker.driven_decode import Decode
from tests.unit.prefill_worker.driven_prefill import Prefill
from worker.core import PLAN_AHEAD_S, TIMER_EARLY_S, Planned, RunStep, StepTimes

STEP_S = 0.1


def decoding(max_tokens: int = 12) -> Decode:
    """A worker at the start of a decode step of known duration: two tokens are out, and the step samples the third."""
    worker = Decode(plans_ahead=True)
    worker.arrive_alone(request("a", 6, max_tokens=max_tokens))
    for _ in range(2):
        worker.now += STEP_S
        worker.finish_step()
    assert worker.chunks() == [("a", 7, 1)]
    assert len(worker.plans) == 1
    return worker


def planned(worker: Decode | Prefill) -> list[Planned]:
    return [action.planned for action in worker.of(RunStep)]


# ---- when


def test_a_tick_plans_the_next_step_shortly_before_the_expected_end_of_the_step_in_flight() -> None:
    worker = decoding()
    started_at = worker.now
    assert worker.machine.next_deadline() == pytest.approx(started_at + STEP_S - PLAN_AHEAD_S)
    worker.pass_time(STEP_S - PLAN_AHEAD_S - 1e-6)
    assert len(worker.plans) == 1
    worker.pass_time(2e-6)
    assert [worker.chunks(0), worker.chunks(1)] == [[("a", 7, 1)], [("a", 8, 1)]]


def test_a_timer_that_is_a_little_early_is_no_reason_for_another_timer() -> None:
    worker = decoding()
    worker.now += STEP_S - PLAN_AHEAD_S - TIMER_EARLY_S / 2
    worker.post(Tick())
    assert len(worker.plans) == 2


def test_a_sequence_that_arrives_before_that_time_is_in_the_next_step_and_a_later_one_is_not() -> None:
    worker = decoding()
    worker.pass_time(STEP_S - 2 * PLAN_AHEAD_S)
    worker.arrive_alone(request("early", 3, first=20))
    assert len(worker.plans) == 1, "the step is planned too early"
    worker.pass_time(PLAN_AHEAD_S + 1e-6)
    worker.arrive_alone(request("late", 3, first=30))
    assert worker.chunks(1) == [("a", 8, 1), ("early", 0, 3)]


def test_a_short_step_gets_its_successor_at_once() -> None:
    worker = Decode(plans_ahead=True)
    worker.arrive_alone(request("a", 6, max_tokens=8))
    for _ in range(3):
        worker.now += PLAN_AHEAD_S / 2
        worker.finish_step()
    assert len(worker.plans) == 2
    assert planned(worker)[-1] is Planned.AHEAD


def test_a_step_of_unknown_duration_gets_its_successor_at_its_end() -> None:
    worker = Decode(plans_ahead=True)
    worker.arrive_alone(request("a", 6))
    worker.pass_time(1.0)
    assert len(worker.plans) == 1
    worker.finish_step()
    assert planned(worker) == [Planned.IDLE, Planned.AT_END]


def test_the_first_step_after_a_time_without_work_is_marked() -> None:
    worker = decoding(max_tokens=3)
    worker.pass_time(STEP_S)
    worker.finish_step()
    assert not worker.plans
    worker.now += 1.0
    worker.arrive_alone(request("b", 3, first=20))
    assert planned(worker)[-1] is Planned.IDLE


def test_a_step_that_cannot_be_planned_ahead_sets_no_timer_in_the_past() -> None:
    worker = decoding(max_tokens=3)
    worker.pass_time(STEP_S - PLAN_AHEAD_S + 1e-6)
    assert len(worker.plans) == 1, "the promised token is the last"
    deadline = worker.machine.next_deadline()
    assert deadline is None or deadline > worker.now
    worker.arrive_alone(request("b", 3, first=20))
    assert worker.chunks(1) == [("b", 0, 3)], "but the next event tries again"


def test_the_expected_duration_falls_at_once_and_rises_by_a_quarter() -> None:
    times = StepTimes()
    assert times.expected_s(100) is None
    for duration_s, expected_s in [(1.0, 1.0), (0.2, 0.2), (0.6, 0.3)]:
        times.record(100, duration_s)
        assert times.expected_s(100) == pytest.approx(expected_s)
    assert times.expected_s(101) == pytest.approx(0.3), "a similar size"
    assert times.expected_s(128) is None


# ---- what becomes of the step ahead


def test_a_failed_step_ends_its_calls_and_a_call_of_the_step_ahead_goes_on() -> None:
    worker = decoding()
    worker.pass_time(STEP_S / 2)
    worker.arrive_alone(request("b", 3, first=20, max_tokens=3))
    worker.pass_time(STEP_S / 2 - PLAN_AHEAD_S + 1e-6)
    assert worker.chunks(1) == [("a", 8, 1), ("b", 0, 3)]
    worker.fail_step()
    failed = worker.only(DecodeFailed)
    assert failed.request_id == "a"
    assert isinstance(failed.error, TandemError)
    assert worker.chunks() == [("b", 0, 3)]
    worker.run_until_idle()
    assert worker.emitted("b") == [3, 4, 5]
    assert worker.ledger == {}


def test_a_sequence_without_memory_ends_while_the_step_ahead_contains_it_and_others_emit_both_tokens() -> None:
    worker = decoding()
    worker.pass_time(STEP_S / 2)
    worker.arrive_alone(request("b", 3, first=20, max_tokens=6))
    for _ in range(3):  # the prompt of b, and a step of two sequences whose duration is then known
        worker.pass_time(STEP_S / 2)
        worker.finish_step()
    worker.pass_time(STEP_S)
    assert [worker.chunks(0), worker.chunks(1)] == [[("a", 10, 1), ("b", 4, 1)], [("a", 11, 1), ("b", 5, 1)]]
    assert worker.emitted("b") == [3, 4]
    worker.finish_step("a")
    failed = worker.only(DecodeFailed)
    assert failed.request_id == "a"
    assert isinstance(failed.error, OutOfDeviceMemory)
    worker.finish_step("a")
    assert worker.only(DecodeFailed) is failed, "the call of a failed sequence ends twice"
    worker.run_until_idle()
    assert worker.emitted("b") == [3, 4, 5, 6, 7, 8]
    assert worker.ledger == {}
    assert worker.machine.idle


def test_a_step_with_a_failed_sequence_teaches_no_duration() -> None:
    """The runner computes such a step again in parts, so its duration says nothing about the next one."""
    worker = decoding()
    worker.arrive_alone(request("b", 3, first=20, max_tokens=3))
    worker.finish_step()
    before = worker.core.costs.cost
    worker.now += 100.0
    worker.finish_step("b")
    assert worker.core.costs.cost is before
    worker.now += 100.0
    worker.finish_step()
    assert worker.core.costs.cost is not before


def test_the_time_of_the_engine_counts_and_not_that_of_a_loop_that_stood_still() -> None:
    worker = decoding()
    before = worker.core.costs.cost.seconds(decode := StepWork(1, 8, 0, 0.0))
    worker.now += 100.0
    worker.finish_step(seconds=before)
    assert worker.core.costs.cost.seconds(decode) == pytest.approx(before, rel=0.1)


def test_a_prompt_is_offered_chunk_by_chunk_over_two_steps_in_flight() -> None:
    worker = Prefill(plans_ahead=True)
    for ticket, name in ((1, "first"), (2, "a")):
        worker.arrive(request(name, 18, first=100 * ticket), ticket)
        worker.want(0, 1, 2, 3, 4, ticket=ticket)
        while worker.plans:
            assert len(worker.offered()) <= 10
            worker.finish_step()
            worker.pass_time(PLAN_AHEAD_S / 2)
    assert Planned.AHEAD in planned(worker)
    assert worker.offered() == [0, 1, 2, 3, 4] * 2
    assert [done.request_id for done in worker.of(PrefillDone)] == ["first", "a"]
