"""The queue is priced again only when room has changed, and a router's calls are numbered and reconciled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.cost.step_cost import PRIOR
from core.errors import QueueFull, WorkerUnavailable
from core.lifecycle import ServiceRole, WorkerState
from core.scheduling.worker_load import RouterCalls, WorkerChanges
from router.requests import events
from tests.unit.router.driving_router import CONFIG, SERVING, DrivenRouter, request

FULL = replace(CONFIG, max_in_flight_per_worker=1, max_queued=2_000)
LOST = WorkerUnavailable("connection reset")


def count_prices(router: DrivenRouter) -> Callable[[], int]:
    """The number of requests that were priced since the last call."""
    priced: list[Any] = []
    choose = router.machine.workers.choose

    def counted(*args: Any, **options: Any) -> Any:
        priced.append(args)
        return choose(*args, **options)

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
    """The prefill worker is full. The second request avoids it, so the decode worker may serve that one alone."""
    config = replace(CONFIG, max_in_flight_per_worker=1)
    router = DrivenRouter(config, decode=("D1", "D2", "D3"))
    router.arrive(request("runs"))
    router.arrive(request("waits"))
    router.arrive(request("fails"))
    assert [dispatch for dispatch, _, _ in router.dispatches()] == ["runs#1"], "in rank order"
    router.machine._requests["fails"].failed_workers = frozenset({"P"})
    router.post(events.ClientCancelled("waits"))
    assert router.dispatches()[1:] == [("fails#1", None, "D2")]


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


def test_a_thousand_queued_requests_are_served_in_rank_order() -> None:
    router = DrivenRouter(FULL, prefill=())
    machine, names = router.machine, [f"r{number:05}" for number in range(1_000)]
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


def prompt_s(num_tokens: int) -> float:
    return PRIOR.prompt_seconds(num_tokens)


def view(router: DrivenRouter, name: str = "D") -> tuple[float, int]:
    """Seconds of prompt work and number of sequences."""
    seen = router.machine.workers.chosen(name).view
    return pytest.approx(sum(seen.backlog) + sum(seen.arriving), abs=1e-6), seen.num_sequences  # type: ignore[return-value]


def test_a_load_is_the_report_and_the_calls_that_had_not_arrived() -> None:
    router = DrivenRouter(prefill=())
    first, second = prompt_s(20), prompt_s(30)
    router.arrive(request("a", prompt=range(1, 21)))
    router.arrive(request("b", prompt=range(1, 31)))
    assert view(router) == (first + second, 2)
    others = {"another": RouterCalls(70, 3)}
    router.report("D", prompt_backlog=(0.1,), num_calls=4, router_calls=others | {"router": RouterCalls(1, 1)})
    assert view(router) == (0.1 + 2 * second, 5), "call 2 was on the way, and stands for a call of the other router too"
    router.report("D", prompt_backlog=(0.0, 0.09), num_calls=5, router_calls=others | {"router": RouterCalls(2, 2)})
    assert view(router) == (0.09, 5)
    router.decode_fails(LOST, "b#1")  # the end is faster than the next report
    assert view(router) == (0.09, 4)


def test_a_call_on_the_way_counts_once_for_each_router_with_open_calls() -> None:
    """Every router sees the same reports and chooses alike; their calls on the way are unseen."""
    router, one = DrivenRouter(prefill=(), decode=("D", "E")), prompt_s(20)

    def work() -> list[float]:
        return [view(router, name)[0] for name in ("D", "E")]

    router.arrive(request("a", prompt=range(1, 21)))
    assert work() == [one, 0]
    router.report("E", num_calls=2, router_calls={"second": RouterCalls(9, 1), "third": RouterCalls(5, 1)})
    assert work() == [3 * one, 0], "the routers on any worker count"
    router.report("D", prompt_backlog=(0.007,), num_calls=1, router_calls={"second": RouterCalls(8, 1)})
    assert work() == [0.007 + 3 * one, 0]
    router.report("E")
    assert work() == [0.007 + 2 * one, 0], "the second router has a call on D, the third none"
    router.report("D", prompt_backlog=(0.02,), num_calls=1, router_calls={"router": RouterCalls(1, 1)})
    assert work() == [0.02, 0], "the call has arrived"
    router.machine.workers.check()


def test_calls_that_no_router_has_sent_are_no_other_router() -> None:
    router = DrivenRouter(prefill=())
    router.report("D", num_calls=1, router_calls={"": RouterCalls(0, 1)})
    router.arrive(request("a", prompt=range(1, 21)))
    assert view(router) == (prompt_s(20), 2)


def test_a_call_that_never_arrives_counts_until_it_ends() -> None:
    router = DrivenRouter(prefill=())
    router.arrive(request("a", prompt=range(1, 21)))
    router.post(events.ClientCancelled("a"))
    assert view(router) == (0.0, 0)


def test_the_calls_of_a_pair_bring_prompt_work_to_one_worker_and_blocks_to_the_other() -> None:
    router = DrivenRouter()
    room = router.machine.workers.chosen("D").view.num_free_blocks
    router.arrive(request("a", prompt=range(1, 22)))  # 6 blocks of 4 tokens

    def free_blocks() -> int:
        return router.machine.workers.chosen("D").view.num_free_blocks

    assert (view(router, "P"), view(router, "D")) == ((prompt_s(21), 1), (0.0, 1))
    assert free_blocks() == room - 6
    router.report("P", prompt_backlog=(0.0, 0.021), num_calls=1, router_calls={"router": RouterCalls(2, 1)})
    assert (view(router, "P"), view(router, "D")) == ((0.021, 1), (0.0, 1))
    router.report("D", num_promised_blocks=6, num_calls=1, router_calls={"router": RouterCalls(1, 1)})
    assert free_blocks() == room - 6, "the report promises the blocks, so the call does not take them again"
    router.first_token(11, "a#1")
    assert view(router, "P") == (0.021, 0), "the call has ended, and the next report tells the work"
