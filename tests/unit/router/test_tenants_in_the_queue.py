"""A tenant that floods the router's queue keeps the other tenants neither waiting behind it nor out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import QueueFull, TransferFailed
from core.lifecycle import FinishReason
from router.requests import events
from tests.unit.router.driving_router import CONFIG, DrivenRouter, request

MAX_QUEUED = 6


def flooded() -> DrivenRouter:
    """One worker for one request at a time, which computes "f0". "f1" to "f6" fill the queue."""
    router = DrivenRouter(replace(CONFIG, max_in_flight_per_worker=1, max_queued=MAX_QUEUED), prefill=())
    for number in range(MAX_QUEUED + 1):
        arrive(router, f"f{number}", "flood")
    return router


def arrive(router: DrivenRouter, name: str, tenant: str, priority: int = 0) -> None:
    router.arrive(replace(request(name, max_tokens=2, priority=priority), tenant=tenant))


def complete(router: DrivenRouter, name: str) -> None:
    router.tokens(0, 11, 12, dispatch=f"{name}#1")
    router.decoded(f"{name}#1", FinishReason.LENGTH)


def test_a_full_queue_gives_up_the_newest_request_of_the_tenant_with_most() -> None:
    router = flooded()
    with pytest.raises(QueueFull):
        arrive(router, "more", "flood")
    arrive(router, "other", "quiet")
    ended = router.only(events.Fail)
    assert ended.request_id == f"f{MAX_QUEUED}"
    assert isinstance(ended.error, QueueFull)
    assert router.machine.view.num_queued == MAX_QUEUED


def test_a_full_queue_gives_up_nothing_for_a_request_of_lower_priority() -> None:
    router = flooded()
    with pytest.raises(QueueFull):
        arrive(router, "other", "quiet", priority=1)
    assert not router.of(events.Fail)


def test_tenants_leave_the_queue_in_turn() -> None:
    router = flooded()
    arrive(router, "q1", "quiet")
    arrive(router, "q2", "quiet")
    started = []
    for _ in range(MAX_QUEUED + 1):
        name, _, _ = router.dispatches()[-1]
        started.append(name.removesuffix("#1"))
        complete(router, started[-1])
    assert started == ["f0", "f1", "q1", "f2", "q2", "f3", "f4"]


def test_a_stream_that_goes_on_is_not_behind_the_turns_of_tenants() -> None:
    router = flooded()
    complete(router, "f0")
    arrive(router, "other", "quiet")
    router.tokens(0, 11, dispatch="f1#1")
    router.decode_fails(TransferFailed("stale"), "f1#1")
    assert [name for name, _, _ in router.dispatches()] == ["f0#1", "f1#1", "f1#2"]
