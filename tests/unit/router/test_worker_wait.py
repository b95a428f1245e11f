"""A queued request fails once no decode worker has served for `worker_wait_s`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from core.lifecycle import ServiceRole, WorkerState
from router.requests import events
from tests.unit.router.driving_router import CONFIG, DrivenRouter, request

FULL = replace(CONFIG, max_in_flight_per_worker=1, report_stale_s=1000.0, worker_lost_s=1000.0)


def queued_behind_a_full_worker() -> DrivenRouter:
    """Request `runs` fills the only decode worker. Request `waits` is queued for longer than `worker_wait_s`."""
    router = DrivenRouter(FULL, prefill=())
    router.arrive(request("runs", max_tokens=99), timeout_s=1000.0)
    router.arrive(request("waits"), timeout_s=1000.0)
    router.pass_time(2 * CONFIG.worker_wait_s - 0.5)  # the router checks at multiples of worker_wait_s
    assert not router.of(events.Fail)
    return router


def lose(router: DrivenRouter) -> None:
    router.post(events.WorkerLost("D", "the process has ended"))


def drain(router: DrivenRouter) -> None:
    router.report("D", WorkerState.DRAINING)


def failed(router: DrivenRouter) -> dict[str, str]:
    return {failed.request_id: str(failed.error) for failed in router.of(events.Fail)}


@pytest.mark.parametrize("leave", [lose, drain])
@pytest.mark.parametrize("seconds_absent", [1.0, CONFIG.worker_wait_s - 1.0])
def test_a_short_absence_of_the_only_worker_fails_no_request_in_the_queue(
    leave: Callable[[DrivenRouter], None], seconds_absent: float
) -> None:
    router = queued_behind_a_full_worker()
    leave(router)
    router.pass_time(seconds_absent)
    router.join("D", ServiceRole.DECODE)
    router.pass_time(2.0 * CONFIG.worker_wait_s)
    assert not router.of(events.Fail)


@pytest.mark.parametrize("leave", [lose, drain])
def test_the_wait_ends_worker_wait_s_after_the_last_worker_left(
    leave: Callable[[DrivenRouter], None],
) -> None:
    router = queued_behind_a_full_worker()
    router.pass_time(7.0)  # between two checks of the router
    leave(router)
    router.pass_time(CONFIG.worker_wait_s - 0.1)
    assert not router.of(events.Fail)
    router.pass_time(0.2)
    assert "waits" in failed(router)


def test_each_absence_of_the_worker_starts_a_new_wait() -> None:
    router = queued_behind_a_full_worker()
    for _ in range(4):
        drain(router)
        router.pass_time(0.6 * CONFIG.worker_wait_s)
        router.report("D")
        router.pass_time(0.6 * CONFIG.worker_wait_s)
    assert not router.of(events.Fail)


def test_a_request_that_arrives_while_no_worker_serves_waits_from_its_arrival() -> None:
    router = DrivenRouter(FULL, prefill=())
    drain(router)
    router.pass_time(CONFIG.worker_wait_s - 1.0)
    router.arrive()
    router.pass_time(CONFIG.worker_wait_s - 0.1)
    assert not router.of(events.Fail)
    router.pass_time(0.2)
    assert failed(router).keys() == {"r"}


def test_a_dispatched_request_does_not_wait_for_a_worker() -> None:
    router = DrivenRouter()
    router.arrive()
    router.report("D", WorkerState.DRAINING)
    for _ in range(25):
        router.now += 1.0
        router.report("P")
        router.report("D", WorkerState.DRAINING)
        router.pass_time(0.0)
    assert router.now > 100.0 + CONFIG.worker_wait_s
    assert not router.of(events.Fail)
