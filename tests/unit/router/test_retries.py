"""The second attempt starts at once. Later attempts pause, to spare workers that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import RouterConfig
from core.errors import TandemError, TransferFailed, WorkerDrains, WorkerUnavailable
from core.lifecycle import ServiceRole
from router.requests import events
from tests.unit.router.driving_router import CONFIG, DrivenRouter, request

EPSILON_S = 0.001


def failing(name: str = "r") -> DrivenRouter:
    """A router with one request, whose second attempt has failed."""
    router = DrivenRouter(replace(CONFIG, max_attempts=4, retry_pause_s=0.05), prefill=())
    router.arrive(request(name))
    for attempt in (1, 2):
        router.decode_fails(TransferFailed(f"fault {attempt}"), f"{name}#{attempt}")
    return router


def test_the_second_attempt_starts_at_once_and_the_third_after_a_pause() -> None:
    router = failing()
    assert [attempt for attempt, _, _ in router.dispatches()] == ["r#1", "r#2"]
    router.pass_time(0.05 - EPSILON_S)
    assert len(router.dispatches()) == 2
    router.pass_time(2 * EPSILON_S)
    assert [attempt for attempt, _, _ in router.dispatches()] == ["r#1", "r#2", "r#3"]


def test_each_further_pause_is_twice_as_long() -> None:
    router = failing()
    router.pass_time(0.05 + EPSILON_S)
    router.decode_fails(TransferFailed("fault 3"), "r#3")
    router.pass_time(0.1 - EPSILON_S)
    assert len(router.dispatches()) == 3
    router.pass_time(2 * EPSILON_S)
    assert len(router.dispatches()) == 4


def test_a_request_does_not_wait_for_an_earlier_one_that_pauses() -> None:
    router = failing()
    router.arrive(request("next"))
    assert [attempt for attempt, _, _ in router.dispatches()] == ["r#1", "r#2", "next#1"]


def test_a_request_that_pauses_ends_at_its_deadline_or_when_its_client_cancels() -> None:
    router = failing()
    router.post(events.ClientCancelled("r"))
    assert router.only(events.Fail).request_id == "r"
    assert router.pass_time(1.0) == []
    hasty = DrivenRouter(replace(CONFIG, retry_pause_s=0.5), prefill=())
    hasty.arrive(timeout_s=0.2)
    for attempt in (1, 2):
        hasty.decode_fails(TransferFailed("again"), f"r#{attempt}")
    hasty.pass_time(0.3)
    assert "deadline" in str(hasty.only(events.Fail).error)


@pytest.mark.parametrize("first", ["P1", "P2"])
def test_a_prompt_that_a_worker_has_computed_goes_back_to_it(first: str) -> None:
    """A decode worker that drains has not begun. No report says yet what the prefill worker has cached."""
    second = "P2" if first == "P1" else "P1"
    router = DrivenRouter(prefill=(second,), decode=("D1", "D2"))
    router.report(second, num_calls=99)
    router.join(first, ServiceRole.PREFILL)
    router.arrive()
    router.report(second)
    assert [start.worker_id for start in router.of(events.StartPrefill)] == [first]
    router.first_token(7)
    router.decode_fails(WorkerDrains("the worker drains"))
    assert [start.worker_id for start in router.of(events.StartPrefill)] == [first, first]


@pytest.mark.parametrize("error", [TransferFailed("it failed"), WorkerUnavailable("it died")])
def test_a_prompt_whose_worker_may_have_failed_goes_to_another_one(error: TandemError) -> None:
    router = DrivenRouter(prefill=("P1", "P2"), decode=("D1", "D2"))
    router.arrive()
    (started,) = router.of(events.StartPrefill)
    router.post(events.PrefillReturned("r#1", error))
    assert {start.worker_id for start in router.of(events.StartPrefill)} == {"P1", "P2"}, started


@pytest.mark.parametrize(("attempts", "pause_s"), [(1, 0.0), (2, 0.05), (3, 0.1), (6, 0.8), (7, 1.0), (10_000, 1.0)])
def test_a_pause_is_bounded(attempts: int, pause_s: float) -> None:
    assert RouterConfig().pause_after(attempts) == pytest.approx(pause_s)
