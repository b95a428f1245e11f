"""A prompt goes to the worker that has its prefix on disk, where the read ends sooner than computing elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.block_hash import hash_on_disk, sequence_hashes
from core.config import RouterConfig
from core.lifecycle import ServiceRole
from core.request import Request, SamplingParams
from core.scheduling.worker_load import WorkerChanges
from router.requests import events
from router.requests.machine import RouterMachine
from router.routing.policy import (
    DISK_READ_S,
    MAX_TIMED,
    NO_READ,
    PrefixRead,
    RoutingQuestion,
    SecondsPolicy,
    WorkerView,
)
from tests.unit.router.driving_router import SERVING, agent
from tests.unit.router.test_policy import BLOCK, IDLE, NEVER
from tests.unit.router.test_prefix_sources import BLOCK_BYTES, OWNER, PATH, READER, D

WITH_DISK = replace(IDLE, worker_id="P", block_bytes=BLOCK_BYTES, block_size=BLOCK, disk_bytes_per_s=1e9)
PROMPT = tuple(range(1, 42))
LOAD = replace(SERVING, step_cost=IDLE.cost)
DISK_LOAD = replace(LOAD, num_disk_blocks=10, disk_bytes_per_s=1e9)


def read_by(worker: WorkerView, on_disk: int = 80, cached: int = 0, *, is_peer_near: bool = False) -> PrefixRead:
    """Of a prompt of 100 tokens, which a peer has, too."""
    sources = [(OWNER, 80)] if is_peer_near else []
    question = RoutingQuestion(100, [(worker, cached)], [(D, 0)], True, BLOCK, 0.0, sources, {"P": on_disk})
    (found,) = SecondsPolicy(NEVER).candidates(question)
    return found.read


def test_a_disk_is_read_where_that_is_faster_than_computing() -> None:
    assert read_by(WITH_DISK)[:3] == ("P", 80, pytest.approx(0.02 + DISK_READ_S))
    assert read_by(WITH_DISK, cached=40)[:3] == ("P", 40, pytest.approx(0.01 + DISK_READ_S))
    assert read_by(WITH_DISK, cached=80) is NO_READ
    assert read_by(WITH_DISK, on_disk=100).num_tokens == 96, "the last token is computed"
    assert read_by(replace(WITH_DISK, disk_bytes_per_s=2e8)) is NO_READ  # 0.1 s for 0.08 s
    assert read_by(replace(WITH_DISK, num_free_blocks=19)) is NO_READ


def test_a_large_fleet_does_not_overlook_the_worker_with_the_disk() -> None:
    """Among more workers than are priced, it has slightly more prompt work than the others."""
    others = [(replace(IDLE, worker_id=f"P{number}"), 0) for number in range(3 * MAX_TIMED)]
    busier = replace(WITH_DISK, backlog=(0.0,) * 12 + (0.01,), reported_at=0.0)
    question = RoutingQuestion(100, [*others, (busier, 0)], [(D, 0)], True, BLOCK, 0.0, (), {"P": 80})
    assert SecondsPolicy(NEVER).candidates(question)[0].prefill_worker == "P"


def test_the_faster_of_disk_and_peer_is_read() -> None:
    both = replace(READER, paths={"S": PATH}, block_size=BLOCK, disk_bytes_per_s=2e9)
    assert read_by(both, is_peer_near=True).source == "P"
    assert read_by(replace(both, disk_bytes_per_s=5e8), is_peer_near=True).source == "S"


def test_reports_say_what_lies_on_disk_and_no_peer_is_asked_for_it() -> None:
    machine = RouterMachine(RouterConfig(local_prefill="never", peer_prefixes="auto"), iter(range(1, 99)).__next__)
    hashes = [hash_on_disk(each) for each in sequence_hashes(PROMPT, agent("D").layout.block_size)]
    for name, role, load, cached in (
        ("P0", ServiceRole.PREFILL, LOAD, ()),
        ("P1", ServiceRole.PREFILL, DISK_LOAD, tuple(hashes)),
        ("D", ServiceRole.DECODE, LOAD, ()),
    ):
        machine.handle(events.WorkerJoined(name, role, agent(name), cached, load), 0.0)

    def chosen(number: int) -> events.StartPrefill:
        request = Request(f"r{number}", PROMPT, len(PROMPT), SamplingParams(max_tokens=4))
        actions = machine.handle(events.RequestArrived(request, 0.0, 60.0), 0.0)
        assert not any(isinstance(action, events.OfferPrefix) for action in actions)
        return next(action for action in actions if isinstance(action, events.StartPrefill))

    first = chosen(1)
    assert (first.worker_id, first.prefix) == ("P1", None)
    machine.handle(events.WorkerReported("P1", WorkerChanges(blocks=((hashes, False),))), 0.0)
    assert chosen(2).worker_id == "P0", "the blocks have left the disk of the busier worker"
