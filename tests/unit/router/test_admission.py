"""With `admission = "shed"`, a request whose first token is predicted too late is refused at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.cost.step_cost import PRIOR, StepCost
from core.errors import QueueFull, WorkerUnavailable
from core.lifecycle import ServiceRole
from router.requests import events
from router.requests.admission import QueueWait, refusal
from tests.unit.router.driving_router import CONFIG, SERVING, DrivenRouter, agent, request

SHED = replace(CONFIG, admission="shed", slo_ttft_ms=1000.0, max_queued=20)
FITTED = StepCost(step_s=0.01, sequence_s=0.001, context_s=0.0, token_s=0.05, pair_s=0.0)  # 8 tokens: 0.41 s


def shedding_router(prompt_backlog: tuple[float, ...] = ()) -> DrivenRouter:
    """A router with a decode worker alone, which has measured its steps."""
    router = DrivenRouter(SHED, prefill=())
    router.report("D", step_cost=FITTED, prompt_backlog=prompt_backlog)
    return router


def refused(router: DrivenRouter, name: str = "r") -> QueueFull:
    (failed,) = [fail for fail in router.of(events.Fail) if fail.request_id == name]
    assert isinstance(failed.error, QueueFull)
    return failed.error


def test_a_request_that_would_be_late_is_refused_with_the_lateness_as_hint() -> None:
    router = shedding_router(prompt_backlog=(0.9,))
    router.arrive()
    error = refused(router)
    assert error.retry_after_s == pytest.approx(0.32, abs=0.02), "0.9 s of prompts, 0.41 s of its own, 1 s wanted"
    assert "predicted 1.312 s" in str(error)
    assert "slo_ttft_ms is 1000" in str(error)
    assert not router.dispatches()
    assert (router.machine.view.num_queued, router.machine.view.num_in_flight) == (0, 0)


def test_a_request_that_would_miss_its_deadline_is_refused() -> None:
    router = shedding_router()
    router.arrive(timeout_s=0.3)
    assert "its deadline is 0.300 s" in str(refused(router))


def test_the_hint_is_at_least_a_tenth_of_a_second() -> None:
    router = shedding_router(prompt_backlog=(0.6,))
    router.arrive()
    assert refused(router).retry_after_s == 0.1


def test_queue_admits_what_would_be_late() -> None:
    router = DrivenRouter(replace(SHED, admission="queue"), prefill=())
    router.report("D", step_cost=FITTED, prompt_backlog=(30.0,))
    router.arrive()
    assert len(router.dispatches()) == 1


def test_no_request_is_refused_by_a_guess() -> None:
    """A worker that has measured no step would otherwise never measure one."""
    router = DrivenRouter(SHED, prefill=())
    router.report("D", step_cost=PRIOR, prompt_backlog=(30.0,))
    router.arrive()
    assert len(router.dispatches()) == 1


def test_time_in_the_queue_of_the_router_counts() -> None:
    router = DrivenRouter(SHED, prefill=(), decode=())
    router.arrive()
    router.now += 0.8
    router.arrive(request("later"))
    router.post(events.WorkerJoined("D", ServiceRole.DECODE, agent("D"), (), replace(SERVING, step_cost=FITTED)))
    assert "r" in {failed.request_id for failed in router.of(events.Fail)}
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["later#1"]


def test_a_request_that_has_streamed_tokens_is_never_refused() -> None:
    router = DrivenRouter(SHED, prefill=(), decode=("D1", "D2"))
    router.arrive()
    router.tokens(0, 11)
    for name in ("D1", "D2"):
        router.report(name, step_cost=FITTED, prompt_backlog=(30.0,))
    router.decode_fails(WorkerUnavailable("connection reset"))
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["r#1", "r#2"]


def test_choices_that_follow_the_first_one_are_not_refused() -> None:
    router = shedding_router()
    router.arrive(request("a"), others=[request("b")])
    router.report("D", step_cost=FITTED, prompt_backlog=(30.0,))
    router.tokens(0, 11, dispatch="a#1")
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["a#1", "b#1"]


def test_a_call_is_refused_with_all_its_choices() -> None:
    router = shedding_router(prompt_backlog=(30.0,))
    router.arrive(request("a"), others=[request("b")])
    assert {failed.request_id for failed in router.of(events.Fail)} == {"a", "b"}


def test_a_request_is_refused_on_arrival_if_the_wait_for_room_alone_is_too_long() -> None:
    router = DrivenRouter(replace(SHED, max_in_flight_per_worker=1, slo_ttft_ms=3000.0), prefill=())
    names = [f"r{number}" for number in range(9)]
    for name in names[:4]:
        router.arrive(request(name, max_tokens=1))
    for name in names[:2]:  # a dispatch each second
        router.now += 1.0
        router.tokens(0, 11, dispatch=f"{name}#1")
        router.decoded(f"{name}#1")
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["r0#1", "r1#1", "r2#1"]
    router.arrive(request(names[5], max_tokens=1))  # the second in the queue: 2 s
    router.arrive(request(names[6], max_tokens=1))  # the third: 3 s
    with pytest.raises(QueueFull, match=r"predicted 4\.000 s") as raised:
        router.arrive(request(names[7], max_tokens=1))
    assert raised.value.retry_after_s == pytest.approx(1.0)
    router.machine.check()


def test_the_wait_follows_the_intervals_between_dispatches() -> None:
    wait = QueueWait()
    assert wait.seconds(5) == 0.0, "unknown"
    wait.note_dispatch(10.0)
    wait.note_dispatch(12.0)
    assert wait.seconds(0) == 2.0
    wait.note_dispatch(22.0)
    assert wait.seconds(1) == 6.0, "an outlier moves it by an eighth"
    wait.note_empty()
    wait.note_dispatch(500.0)
    assert wait.seconds(1) == 6.0, "time without a queue is no interval"


def test_dispatches_at_one_moment_share_an_interval() -> None:
    wait = QueueWait()
    for moment in (10.0, 12.0, 14.0):
        for _ in range(4):
            wait.note_dispatch(moment)
    assert wait.seconds(0) == 0.5


def test_requests_of_a_lower_rank_are_not_ahead() -> None:
    router = DrivenRouter(replace(SHED, max_in_flight_per_worker=1, slo_ttft_ms=3000.0), prefill=())
    for number in range(4):
        router.arrive(request(f"r{number}", max_tokens=1, priority=1))
    for number in range(2):  # a dispatch each second
        router.now += 1.0
        router.tokens(0, 11, dispatch=f"r{number}#1")
        router.decoded(f"r{number}#1")
    for number in range(4, 6):
        router.arrive(request(f"r{number}", max_tokens=1, priority=1))
    router.arrive(request("urgent", max_tokens=1))
    with pytest.raises(QueueFull):
        router.arrive(request("r7", max_tokens=1, priority=1))


def test_a_prediction_at_the_limit_is_admitted() -> None:
    assert refusal(SHED, 1.0, 60.0) is None
    assert refusal(SHED, 1.001, 60.0) is not None
