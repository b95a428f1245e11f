"""The choices of a call (n > 1) are admitted or refused together. The others follow the first to its decode worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import DeadlineExceeded, QueueFull, RequestCancelled, TransferFailed
from core.lifecycle import FinishReason, Stage
from router.requests import events
from tests.unit.router.driving_router import CONFIG, DrivenRouter, request


def started(router: DrivenRouter) -> list[str]:
    return [dispatch for dispatch, _, _ in router.dispatches()]


def failed(router: DrivenRouter) -> dict[str, type]:
    return {action.request_id: type(action.error) for action in router.of(events.Fail)}


def test_the_other_choices_start_when_the_decode_worker_has_the_prompt_and_go_there() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    router.arrive(request("a"), others=[request("b"), request("c")])
    router.first_token(11, "a#1")  # of the prefill worker
    assert started(router) == ["a#1"]
    worker = router.of(events.StartDecode)[0].worker_id
    router.tokens(0, 11, dispatch="a#1")
    assert started(router) == ["a#1", "b#1", "c#1"]
    for start in router.of(events.StartDecode)[1:]:
        assert (start.worker_id, start.source) == (worker, None), "the prompt moves once"
    assert len(router.of(events.StartPrefill)) == 1
    router.tokens(1, 12, dispatch="a#1")
    assert len(started(router)) == 3


def test_the_other_choices_go_elsewhere_if_that_worker_fails_them() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    router.arrive(request("a"), others=[request("b")])
    router.first_token(11, "a#1")
    router.tokens(0, 11, dispatch="a#1")
    there = router.of(events.StartDecode)[1].worker_id
    router.decode_fails(TransferFailed("once"), "b#1")
    assert started(router) == ["a#1", "b#1", "b#2"]
    assert router.of(events.StartDecode)[2].worker_id != there


def test_the_other_choices_start_after_a_first_choice_of_one_token() -> None:
    """The prefill worker ends it, and no decode worker ever speaks."""
    router = DrivenRouter()
    router.arrive(request("a", max_tokens=1), others=[request("b", max_tokens=1)])
    router.first_token(11, "a#1", finish_reason=FinishReason.LENGTH)
    assert started(router) == ["a#1", "b#1"]


def test_a_call_is_admitted_or_refused_as_a_whole() -> None:
    router = DrivenRouter(replace(CONFIG, max_in_flight_per_worker=1, max_queued=1), prefill=())
    router.arrive(request("a"), others=[request("b"), request("c")])
    with pytest.raises(QueueFull):
        router.arrive(request("late"), others=[request("later")])
    router.tokens(0, 11, dispatch="a#1")
    assert not router.of(events.Fail)
    for name, after in (("a", 1), ("b", 0), ("c", 0)):
        router.tokens(after, *range(20, 24 - after), dispatch=f"{name}#1")
        router.decoded(f"{name}#1")
    assert [action.request_id for action in router.of(events.Finish)] == ["a", "b", "c"]
    router.arrive(request("late"))


def test_held_choices_count_as_queued() -> None:
    router = DrivenRouter(prefill=())
    router.arrive(request("a"), others=[request("b"), request("c")])
    assert (router.machine.view.num_queued, router.machine.view.num_in_flight) == (2, 1)
    with pytest.raises(QueueFull):  # max_queued is 2
        router.arrive(request("other"))


def test_the_other_choices_stay_held_while_the_first_one_is_retried() -> None:
    router = DrivenRouter(prefill=(), decode=("D1", "D2"))
    router.arrive(request("a"), others=[request("b")])
    router.decode_fails(TransferFailed("once"), "a#1")
    assert started(router) == ["a#1", "a#2"]
    router.tokens(0, 11, dispatch="a#2")
    assert started(router) == ["a#1", "a#2", "b#1"]


def cancel(router: DrivenRouter) -> None:
    router.post(events.ClientCancelled("a"))


def let_the_deadline_pass(router: DrivenRouter) -> None:
    router.pass_time(61.0)


def fail_every_attempt(router: DrivenRouter) -> None:
    for attempt in (1, 2, 3):
        router.decode_fails(TransferFailed("bad"), f"a#{attempt}")
        router.pass_time(1.0)


@pytest.mark.parametrize(
    ("end", "error"),
    [(cancel, RequestCancelled), (let_the_deadline_pass, DeadlineExceeded), (fail_every_attempt, TransferFailed)],
)
def test_the_other_choices_fail_with_a_first_choice_that_has_no_token(end, error) -> None:  # type: ignore[no-untyped-def]
    router = DrivenRouter(replace(CONFIG, report_stale_s=100.0, worker_lost_s=100.0), prefill=())
    router.arrive(request("a"), others=[request("b"), request("c")])
    end(router)
    assert failed(router) == dict.fromkeys("abc", error)
    assert router.machine.view.num_queued == 0
    assert [name.partition("#")[0] for name in started(router)].count("b") == 0


def test_a_held_choice_that_is_cancelled_never_starts() -> None:
    router = DrivenRouter(prefill=())
    router.arrive(request("a"), others=[request("b"), request("c")])
    router.post(events.ClientCancelled("b"))
    router.tokens(0, 11, dispatch="a#1")
    assert started(router) == ["a#1", "c#1"]


def test_the_time_of_a_held_choice_counts_as_time_in_the_queue() -> None:
    router = DrivenRouter(replace(CONFIG, report_stale_s=100.0, worker_lost_s=100.0), prefill=())
    router.arrive(request("a"), others=[request("b", max_tokens=1)])
    router.pass_time(2.0)
    router.tokens(0, 11, dispatch="a#1")
    router.tokens(0, 11, dispatch="b#1")
    router.decoded("b#1")
    outcome = router.only(events.Finish).outcome
    assert outcome.timeline.seconds_in(Stage.QUEUE) == 2.0
    assert outcome.timeline.seconds_in(Stage.TOKENIZE) == 0.0
    assert outcome.finish_reason is FinishReason.LENGTH


def full(router: DrivenRouter, name: str, attempts: range) -> None:
    """The worker refuses each of these attempts, and reports again before the next one."""
    for attempt in attempts:
        router.decode_fails(QueueFull("no room"), f"{name}#{attempt}")
        router.pass_time(1.0)
        router.report("D")


def test_a_full_worker_fails_a_call_only_before_its_first_token() -> None:
    config = replace(CONFIG, report_stale_s=100.0, worker_lost_s=100.0)
    refused = DrivenRouter(config, prefill=())
    refused.arrive(request("a"))
    full(refused, "a", range(1, 4))
    assert failed(refused) == {"a": QueueFull}

    for name in ("a", "b"):  # choice a has tokens; choice b has none, but the call has
        router = DrivenRouter(config, prefill=())
        router.arrive(request("a"), others=[request("b")])
        router.tokens(0, 11, dispatch="a#1")
        full(router, name, range(1, 8))
        assert not router.of(events.Fail)
        assert started(router)[-1] == f"{name}#8"
        router.pass_time(60.0)
        assert failed(router) == dict.fromkeys("ab", DeadlineExceeded)
