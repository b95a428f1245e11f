"""WorkerTable: the workers that can take a request, and the router's view of their load and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import RouterConfig
from core.errors import InvalidRequest, LayoutMismatch
from core.lifecycle import ServiceRole, WorkerState
from core.sequence import Sequence
from core.worker_load import WorkerLoad
from router.workers import WorkerRecord, WorkerTable
from tests.unit.router.driving_router import LAYOUT, SERVING, agent, request

CONFIG = RouterConfig(report_stale_s=3.0, max_in_flight_per_worker=2)


def record(name: str, role: ServiceRole = ServiceRole.DECODE, load: WorkerLoad = SERVING) -> WorkerRecord:
    return WorkerRecord(name, role, agent(name), load, reported_at=0.0)


def table(*records: WorkerRecord) -> WorkerTable:
    workers = WorkerTable(CONFIG)
    for joining in records:
        workers.join(joining, ())
    workers.check()
    return workers


def usable(workers: WorkerTable, now: float = 0.0, avoid: frozenset[str] = frozenset()) -> list[str]:
    return [view.worker_id for view in workers.views(ServiceRole.DECODE, {}, avoid, now)]


def test_a_worker_is_usable_while_its_report_is_fresh() -> None:
    workers = table(record("d"))
    assert usable(workers, now=3.0) == ["d"]
    assert usable(workers, now=3.1) == []


def test_a_suspect_full_draining_or_prefill_worker_is_not_usable_for_decode() -> None:
    workers = table(
        record("suspect"),
        record("full"),
        record("draining", load=replace(SERVING, state=WorkerState.DRAINING)),
        record("prefill", ServiceRole.PREFILL),
        record("fine"),
    )
    workers.suspect("suspect")
    workers.chosen("full").dispatched = {"x#1": 1, "y#1": 1}
    assert usable(workers) == ["fine"]


def test_workers_to_avoid_are_usable_only_if_there_are_no_others() -> None:
    workers = table(record("d1"), record("d2"))
    assert usable(workers, avoid=frozenset({"d1"})) == ["d2"]
    assert usable(workers, avoid=frozenset({"d1", "d2"})) == ["d1", "d2"]


def test_load_is_the_larger_of_the_report_and_the_router_s_own_count() -> None:
    workers = table(record("d", load=replace(SERVING, num_queued_tokens=40, num_running=1)))
    (view,) = workers.views(ServiceRole.DECODE, {}, frozenset(), 0.0)
    assert (view.num_queued_tokens, view.num_sequences) == (40, 1)
    workers.chosen("d").dispatched = {"x#1": 60}
    (view,) = workers.views(ServiceRole.DECODE, {}, frozenset(), 0.0)
    assert (view.num_queued_tokens, view.num_sequences) == (60, 1)


def test_cached_tokens_follow_the_snapshot() -> None:
    workers = WorkerTable(CONFIG)
    joining = record("d")
    workers.join(joining, ())
    hashes = workers.hashes(request(prompt=range(1, 13)))
    workers.join(joining, hashes[LAYOUT.block_size][:2])
    (view,) = workers.views(ServiceRole.DECODE, hashes, frozenset(), 0.0)
    assert view.cached_tokens == 8


def test_a_fresh_snapshot_keeps_the_dispatches_and_ends_the_suspicion() -> None:
    workers = table(record("d"))
    workers.chosen("d").dispatched["x#1"] = 5
    workers.suspect("d")
    workers.join(record("d"), ())
    assert usable(workers) == ["d"]
    assert workers.chosen("d").dispatched == {"x#1": 5}


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("quantization", "int8")])
def test_a_worker_whose_layout_differs_is_refused_unless_it_is_alone(field: str, value: str) -> None:
    workers = table(record("d"))
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=field):
        workers.join(replace(record("e"), agent=agent("e", layout=other)), ())
    workers.join(replace(record("d"), agent=agent("d", layout=other)), ())
    assert workers.chosen("d").agent.layout == other


def test_the_index_forgets_the_blocks_of_a_worker_that_leaves() -> None:
    workers = WorkerTable(CONFIG)
    workers.join(record("d"), [1, 2])
    left = workers.leave("d", 0.0)
    assert left is not None
    assert workers.index.match([1, 2]) == {}
    assert workers.leave("d", 0.0) is None


def test_there_are_no_hashes_until_a_worker_with_a_block_size_has_joined() -> None:
    workers = WorkerTable(CONFIG)
    assert workers.hashes(request()) == {}
    assert workers.candidates(8, {}, frozenset(), 0.0) == []
    workers.join(record("d"), ())
    assert len(workers.hashes(request(prompt=range(1, 10)))[LAYOUT.block_size]) == 2


def test_has_role_needs_a_serving_worker_that_is_not_avoided() -> None:
    workers = table(record("p", ServiceRole.PREFILL))
    assert workers.has_role(ServiceRole.PREFILL)
    assert not workers.has_role(ServiceRole.PREFILL, avoid=frozenset({"p"}))
    assert not workers.has_role(ServiceRole.DECODE)


WIDE = replace(LAYOUT, block_size=2 * LAYOUT.block_size)


def wide_prefill(**fields: object) -> WorkerRecord:
    return replace(record("p"), role=ServiceRole.PREFILL, agent=agent("p", layout=replace(WIDE, **fields)))  # type: ignore[arg-type]


def test_each_worker_is_matched_by_the_block_size_of_its_pool() -> None:
    workers = table(record("d"))
    workers.join(wide_prefill(), ())
    hashes = workers.hashes(request(prompt=range(1, 14)))  # 13 tokens
    assert {size: len(found) for size, found in hashes.items()} == {4: 3, 8: 1}
    workers.join(record("d"), hashes[4])
    workers.join(wide_prefill(), hashes[8])
    (decode,) = workers.views(ServiceRole.DECODE, hashes, frozenset(), 0.0)
    (prefill,) = workers.views(ServiceRole.PREFILL, hashes, frozenset(), 0.0)
    assert (decode.cached_tokens, prefill.cached_tokens) == (12, 8)
    (pair,) = [found for found in workers.candidates(13, hashes, frozenset(), 0.0) if found.prefill_worker == "p"]
    assert (pair.cached_tokens, pair.transfer_blocks) == (8, 1), "the decode worker lacks the last of its four blocks"
    workers.join(record("d"), hashes[4][:1])
    (pair,) = [found for found in workers.candidates(13, hashes, frozenset(), 0.0) if found.prefill_worker == "p"]
    assert pair.transfer_blocks == 3, "counted in the decode worker's blocks of 4 tokens"


def test_a_request_only_matches_blocks_with_its_salt() -> None:
    workers = table(record("d"))
    plain = request(prompt=range(1, 10))
    salted = replace(plain, cache_salt="mine")
    (found,) = workers.hashes(salted).values()
    assert found == [block.sequence_hash for block in Sequence(salted, arrival=0).full_blocks(LAYOUT.block_size)]
    assert not set(found) & set(workers.hashes(plain)[LAYOUT.block_size])


def test_block_sizes_must_be_equal_in_a_pool_and_multiples_between_pools() -> None:
    workers = table(record("d"))
    with pytest.raises(LayoutMismatch, match="block_size"):
        workers.join(replace(record("e"), agent=agent("e", layout=WIDE)), ())
    with pytest.raises(LayoutMismatch, match="block_size"):
        workers.join(wide_prefill(block_size=6), ())
    with pytest.raises(LayoutMismatch, match="dtype"):
        workers.join(wide_prefill(dtype="bfloat16"), ())


def test_the_largest_request_follows_from_the_blocks_of_the_decode_pool() -> None:
    workers = WorkerTable(CONFIG)
    workers.join(wide_prefill(), ())
    workers.join(record("d"), ())
    room = workers.chosen("d").agent.num_blocks * LAYOUT.block_size
    workers.refuse_oversized(request(prompt=range(1, room + 1), max_tokens=1))
    with pytest.raises(InvalidRequest, match=f"at most {room + 1} tokens"):
        workers.refuse_oversized(request(prompt=range(1, room + 1), max_tokens=2))
