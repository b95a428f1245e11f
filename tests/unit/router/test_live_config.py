"""The router takes live options: what runs or waits beyond a lowered limit goes on, and deadlines move at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import QueueFull
from core.lifecycle import ServiceRole
from router.requests import events
from tests.unit.router.driving_router import CONFIG, DrivenRouter, request


def changed(router: DrivenRouter, **options: object) -> list[events.RouterAction]:
    """`post` checks every invariant."""
    return router.post(events.ConfigChanged(replace(CONFIG, **options)))  # type: ignore[arg-type]


def test_calls_beyond_a_lowered_limit_go_on_and_a_raised_one_is_used_at_once() -> None:
    router = DrivenRouter(prefill=())
    for name in "abc":
        router.arrive(request(name))
    changed(router, max_in_flight_per_worker=1)
    router.report("D")
    assert router.machine.view.num_in_flight == 3
    router.arrive(request("d"))
    assert (router.machine.view.num_in_flight, router.machine.view.num_queued) == (3, 1)
    started = changed(router, max_in_flight_per_worker=4)
    assert [start.dispatch_id for start in started if isinstance(start, events.StartDecode)] == ["d#1"]
    assert not router.of(events.Fail)


def test_requests_beyond_a_lowered_queue_bound_wait_on_and_new_ones_are_refused() -> None:
    router = DrivenRouter(replace(CONFIG, max_queued=10), prefill=(), decode=())
    for name in "abc":
        router.arrive(request(name))
    changed(router, max_queued=1)
    with pytest.raises(QueueFull, match="3 requests are queued, and max_queued is 1"):
        router.arrive(request("d"))
    assert router.machine.view.num_queued == 3


def test_a_shorter_time_without_workers_ends_requests_that_wait_already() -> None:
    router = DrivenRouter(prefill=(), decode=())
    router.arrive()
    router.pass_time(5.0)
    changed(router, worker_wait_s=7.0)
    router.pass_time(1.9)
    assert not router.of(events.Fail)
    router.pass_time(0.2)
    assert [fail.request_id for fail in router.of(events.Fail)] == ["r"]


def test_requests_wait_as_long_as_a_start_takes_that_the_planner_begins() -> None:
    router = DrivenRouter(replace(CONFIG, worker_wait_s=7.0), prefill=(), decode=())
    router.arrive(timeout_s=1000.0)
    router.post(events.StartExpected(60.0))
    router.pass_time(89.0)
    assert not router.of(events.Fail)
    router.join("D", ServiceRole.DECODE)
    assert [start.dispatch_id for start in router.of(events.StartDecode)] == ["r#1"]
    router = DrivenRouter(replace(CONFIG, worker_wait_s=7.0), prefill=(), decode=())
    router.arrive(timeout_s=1000.0)
    router.post(events.StartExpected(60.0))
    router.pass_time(91.0)
    assert [fail.request_id for fail in router.of(events.Fail)] == ["r"]


def test_a_silent_worker_is_lost_by_the_new_limit() -> None:
    router = DrivenRouter()
    router.pass_time(5.0)
    router.report("P")
    changed(router, worker_lost_s=4.0)
    router.pass_time(0.1)
    assert [record.worker_id for record in router.machine.view.workers()] == ["P"]
    router.pass_time(4.0)
    assert not list(router.machine.view.workers())
