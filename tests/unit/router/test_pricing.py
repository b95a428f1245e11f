"""The queue is priced again only when room has changed, and a router's calls are numbered and reconciled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.errors import QueueFull, WorkerUnavailable
from core.lifecycle import ServiceRole, WorkerState
from core.worker_load import RouterCalls, WorkerChanges
from router import events
from tests.unit.router.driving_router import CONFIG, SERVING, DrivenRouter, request

FULL = replace(CONFIG, max_in_flight_per_worker=1, max_queued=20_000)
LOST = WorkerUnavailable("connection reset")


def count_prices(router: DrivenRouter) -> Callable[[], int]:
    """The number of requests that were priced since the last call."""
    priced: list[Any] = []
    choose = router.machine.workers.choose

    def counted(*args: Any) -> Any:
        priced.append(args)
        return choose(*args)

    router.machine.workers.choose = counted  # type: ignore[method-assign, assignment]

    def since_last() -> int:
        number = len(priced)
        priced.clear()
        return number

    return since_last


def full_router() -> DrivenRouter:
    """Request `runs` fills the only decode worker; `waits` is queued."""
    router = DrivenRouter(FULL, prefill=())
    router.arrive(request("runs"))
    router.arrive(request("waits"))
    return router


def test_reports_tokens_and_later_requests_price_nothing_while_no_room_is_gained() -> None:
    router = full_router()
    prices = count_prices(router)
    for number in range(50):
        router.report("D", num_running=1, num_queued_tokens=50 - number)
        router.store("D", number)
        router.tokens(0, 11, dispatch="runs#1")
        router.arrive(request(f"later-{number}"))
    assert prices() == 0
    router.decoded("runs#1")
    assert prices() == 2, "the first of the queue finds room, and the next one finds none"
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["runs#1", "waits#1"]


def free_the_worker(router: DrivenRouter) -> None:
    router.tokens(0, 11, dispatch="runs#1")
    router.decoded("runs#1")


def join_another(router: DrivenRouter) -> None:
    router.join("D2", ServiceRole.DECODE)


def cancel_the_running_request(router: DrivenRouter) -> None:
    router.post(events.ClientCancelled("runs"))


@pytest.mark.parametrize("gain", [free_the_worker, join_another, cancel_the_running_request])
def test_the_queue_is_priced_when_room_is_gained(gain: Callable[[DrivenRouter], None]) -> None:
    router = full_router()
    gain(router)
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["runs#1", "waits#1"]


def test_a_request_waits_while_the_calls_of_another_router_fill_the_worker() -> None:
    router = DrivenRouter(FULL, prefill=())
    busy = replace(SERVING, num_calls=1, router_calls={"another": RouterCalls(9, 1)})
    router.post(events.WorkerReported("D", WorkerChanges(busy)))
    router.arrive()
    assert router.dispatches() == []
    router.report("D")
    assert router.dispatches() == [("r#1", None, "D")]


def test_a_request_that_is_first_in_the_queue_is_priced_even_if_the_one_before_found_no_room() -> None:
    """The prompt of the second one is short enough for the decode worker alone."""
    config = replace(CONFIG, max_in_flight_per_worker=1, local_prefill_tokens=8)
    router = DrivenRouter(config, decode=("D1", "D2", "D3"))
    router.arrive(request("runs", prompt=range(1, 30)))
    router.arrive(request("long", prompt=range(1, 30)))
    router.arrive(request("short"))
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["runs#1"], "in rank order"
    router.post(events.ClientCancelled("long"))
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["runs#1", "short#1"]


def test_a_prompt_that_waits_for_the_last_prefill_worker_runs_without_it_once_that_is_gone() -> None:
    router = DrivenRouter(replace(CONFIG, max_in_flight_per_worker=1), decode=("D1", "D2"))
    router.arrive(request("runs"))
    router.arrive(request("waits"))
    assert len(router.dispatches()) == 1
    router.report("P", WorkerState.DRAINING)
    assert router.dispatches()[1:] == [("waits#1", None, "D2")]


def test_a_retry_whose_pause_has_ended_is_priced() -> None:
    router = DrivenRouter(replace(CONFIG, max_attempts=9), prefill=(), decode=("D1", "D2", "D3"))
    router.arrive()
    for attempt in (1, 2):
        router.decode_fails(QueueFull("no room"), f"r#{attempt}")
    for name in ("D1", "D2", "D3"):
        router.report(name)
    assert len(router.dispatches()) == 2, "it pauses"
    router.pass_time(CONFIG.retry_pause_s)
    assert len(router.dispatches()) == 3


def test_ten_thousand_queued_requests_are_served_in_rank_order() -> None:
    router = DrivenRouter(FULL, prefill=())
    machine, names = router.machine, [f"r{number:05}" for number in range(10_000)]
    for name in names:
        machine.handle(events.RequestArrived(request(name, max_tokens=1), router.now, router.now + 1000.0), router.now)
    prices, served = count_prices(router), []
    for name in names:
        served.append(name)
        actions = machine.handle(events.ClientCancelled(name), router.now)
        started = [action.dispatch_id for action in actions if isinstance(action, events.StartDecode)]
        assert started == ([f"{names[len(served)]}#1"] if len(served) < len(names) else [])
    assert prices() <= 2 * len(names)
    router.machine.check()


def test_calls_are_numbered_over_all_workers_in_the_order_of_their_start() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    for name in ("a", "b"):
        router.arrive(request(name))
    router.prefill_fails(LOST, "a#1")
    numbers = [action.call for action in router.actions if isinstance(action, events.StartDecode | events.StartPrefill)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 5


def test_a_load_is_the_report_and_the_calls_that_had_not_arrived() -> None:
    router = DrivenRouter(replace(CONFIG, local_prefill_tokens=99), prefill=())

    def view() -> tuple[int, int]:
        seen = router.machine.workers.chosen("D").view
        return seen.num_queued_tokens, seen.num_sequences

    router.arrive(request("a", prompt=range(1, 21)))
    router.arrive(request("b", prompt=range(1, 31)))
    assert view() == (50, 2)
    others = {"another": RouterCalls(70, 3)}
    router.report("D", num_queued_tokens=100, num_calls=4, router_calls=others | {"router": RouterCalls(1, 1)})  # type: ignore[arg-type]
    assert view() == (160, 5), "call 2 was on the way, and stands for a call of the other router too"
    router.report("D", num_queued_tokens=90, num_calls=5, router_calls=others | {"router": RouterCalls(2, 2)})  # type: ignore[arg-type]
    assert view() == (90, 5)
    router.decode_fails(LOST, "b#1")  # the end is faster than the next report
    assert view() == (90, 4)


def test_a_call_on_the_way_counts_once_for_each_router_with_open_calls() -> None:
    """Every router sees the same reports and chooses alike; their calls on the way are unseen."""
    router = DrivenRouter(replace(CONFIG, local_prefill_tokens=99), prefill=(), decode=("D", "E"))

    def queued() -> list[int]:
        return [router.machine.workers.chosen(name).view.num_queued_tokens for name in ("D", "E")]

    router.arrive(request("a", prompt=range(1, 21)))
    assert queued() == [20, 0]
    router.report("E", num_calls=2, router_calls={"second": RouterCalls(9, 1), "third": RouterCalls(5, 1)})  # type: ignore[arg-type]
    assert queued() == [60, 0], "the routers on any worker count"
    router.report("D", num_queued_tokens=7, num_calls=1, router_calls={"second": RouterCalls(8, 1)})  # type: ignore[arg-type]
    assert queued() == [67, 0]
    router.report("E")
    assert queued() == [47, 0], "the second router has a call on D, the third none"
    router.report("D", num_queued_tokens=20, num_calls=1, router_calls={"router": RouterCalls(1, 1)})  # type: ignore[arg-type]
    assert queued() == [20, 0], "the call has arrived"
    router.machine.workers.check()


def test_a_call_that_never_arrives_counts_until_it_ends() -> None:
    router = DrivenRouter(replace(CONFIG, local_prefill_tokens=99), prefill=())
    router.arrive(request("a", prompt=range(1, 21)))
    router.post(events.ClientCancelled("a"))
    seen = router.machine.workers.chosen("D").view
    assert (seen.num_queued_tokens, seen.num_sequences) == (0, 0)
