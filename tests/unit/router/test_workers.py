"""WorkerTable: the workers that can take a request, and the router's view of their load and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.block_hash import sequence_hashes
from core.config import RouterConfig
from core.cost.step_cost import PRIOR
from core.errors import InvalidRequest, LayoutMismatch, MemoryMismatch
from core.handoff import DevicePath, PoolAccess
from core.lifecycle import ServiceRole, WorkerState
from core.scheduling.sequence import Sequence
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from router.routing.policy import Candidate, SecondsPolicy
from router.routing.worker_record import CallWork, WorkerRecord
from router.routing.workers import WorkerTable, hashes_of
from tests.unit.router.driving_router import LAYOUT, SERVING, agent, request

CONFIG = RouterConfig(report_stale_s=3.0, max_in_flight_per_worker=2)
WORK = CallWork(prompt_s=0.005, num_blocks=3)


def empty_table() -> WorkerTable:
    return WorkerTable(CONFIG, SecondsPolicy(CONFIG))


def record(name: str, role: ServiceRole = ServiceRole.DECODE, load: WorkerLoad = SERVING) -> WorkerRecord:
    return WorkerRecord(name, role, agent(name), load, 0.0, "router", CONFIG.max_in_flight(False))


def table(*records: WorkerRecord) -> WorkerTable:
    workers = empty_table()
    for joining in records:
        workers.join(joining, ())
    workers.check()
    return workers


def usable(workers: WorkerTable, now: float = 0.0, avoid: frozenset[str] = frozenset()) -> list[str]:
    """The decode workers that can take a request."""
    found = workers.candidates(hashes_of(request()), avoid, now)
    return sorted({candidate.decode_worker for candidate in found})


def test_a_suspect_full_draining_or_prefill_worker_is_not_usable_for_decode() -> None:
    workers = table(
        record("suspect"),
        record("full"),
        record("draining", load=replace(SERVING, state=WorkerState.DRAINING)),
        record("prefill", ServiceRole.PREFILL),
        record("fine"),
    )
    workers.suspect("suspect")
    workers.chosen("full").add_call("x#1", 1, WORK)
    workers.chosen("full").add_call("y#1", 2, WORK)
    assert usable(workers) == ["fine"]


def test_workers_to_avoid_are_usable_only_if_there_are_no_others() -> None:
    workers = table(record("d1"), record("d2"))
    assert usable(workers, avoid=frozenset({"d1"})) == ["d2"]
    assert usable(workers, avoid=frozenset({"d1", "d2"})) == ["d1", "d2"]


def test_a_fresh_snapshot_keeps_the_dispatches_and_ends_the_suspicion() -> None:
    workers = table(record("d"))
    workers.chosen("d").add_call("x#1", 1, WORK)
    workers.suspect("d")
    workers.join(record("d"), ())
    assert usable(workers) == ["d"]
    seen = workers.chosen("d").view
    assert (sum(seen.arriving), seen.num_sequences, seen.num_dispatched) == (WORK.prompt_s, 1, 1)


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("quantization", "int8")])
def test_a_worker_whose_layout_differs_is_refused_unless_it_is_alone(field: str, value: str) -> None:
    workers = table(record("d"))
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=field):
        workers.join(replace(record("e"), agent=agent("e", layout=other)), ())
    workers.join(replace(record("d"), agent=agent("d", layout=other)), ())
    assert workers.chosen("d").agent.layout == other


def test_a_worker_whose_pool_no_path_reaches_is_refused_by_both_memories() -> None:
    on_device = PoolAccess(0, frozenset({DevicePath.MAPPED, DevicePath.STAGED}))
    prefill = record("p", ServiceRole.PREFILL)
    workers = table(replace(prefill, agent=replace(prefill.agent, access=on_device)))
    with pytest.raises(MemoryMismatch, match="from a pool in the memory of CUDA device 0 to a pool in host memory"):
        workers.join(record("d"), ())
    reader = record("d")
    workers.join(replace(reader, agent=replace(reader.agent, access=on_device)), ())


def test_the_index_forgets_the_blocks_of_a_worker_that_leaves() -> None:
    workers = empty_table()
    workers.join(record("d"), [1, 2])
    left = workers.leave("d", 0.0)
    assert left is not None
    assert workers.index.match([1, 2]) == {}
    assert workers.leave("d", 0.0) is None


def test_nothing_of_a_prompt_is_hashed_while_no_decode_worker_has_room() -> None:
    workers = empty_table()
    prompt = hashes_of(request(prompt=range(1, 10)))
    assert workers.candidates(prompt, frozenset(), 0.0) == []
    workers.join(record("d"), ())
    workers.suspect("d")
    assert workers.choose(prompt, frozenset(), 0.0) is None
    assert prompt.chain(LAYOUT.block_size).num_computed == 0


def test_a_prompt_is_hashed_to_the_first_block_that_no_worker_has() -> None:
    workers = empty_table()
    prompt = hashes_of(request(prompt=range(1, 41)))
    workers.join(record("d"), sequence_hashes(range(1, 41), LAYOUT.block_size)[:3])
    assert workers.choose(prompt, frozenset(), 0.0) is not None
    assert prompt.chain(LAYOUT.block_size).num_computed == 4


WIDE = replace(LAYOUT, block_size=2 * LAYOUT.block_size)


def wide_prefill(**fields: object) -> WorkerRecord:
    return replace(record("p"), role=ServiceRole.PREFILL, agent=agent("p", layout=replace(WIDE, **fields)))  # type: ignore[arg-type]


def test_each_worker_is_matched_by_the_block_size_of_its_pool() -> None:
    workers = table(record("d"))
    workers.join(wide_prefill(), ())
    prompt = request(prompt=range(1, 14))  # 13 tokens
    narrow, wide = sequence_hashes(prompt.token_ids, 4), sequence_hashes(prompt.token_ids, 8)
    assert (len(narrow), len(wide)) == (3, 1)
    workers.join(record("d"), narrow)
    workers.join(wide_prefill(), wide)

    def pair() -> Candidate:
        (found,) = [c for c in workers.candidates(hashes_of(prompt), frozenset(), 0.0) if c.prefill_worker == "p"]
        return found

    assert (pair().cached_tokens, pair().transfer_blocks) == (8, 1), "the decode worker lacks its last block of four"
    workers.join(record("d"), narrow[:1])
    assert pair().transfer_blocks == 3, "counted in the decode worker's blocks of 4 tokens"


def test_a_request_only_matches_blocks_with_its_salt() -> None:
    plain = request(prompt=range(1, 10))
    salted = replace(plain, cache_salt="mine")
    found = list(hashes_of(salted).chain(LAYOUT.block_size))
    assert found == [block.sequence_hash for block in Sequence(salted, arrival=0).full_blocks(LAYOUT.block_size)]
    assert not set(found) & set(hashes_of(plain).chain(LAYOUT.block_size))


def test_block_sizes_must_be_equal_in_a_pool_and_multiples_between_pools() -> None:
    workers = table(record("d"))
    with pytest.raises(LayoutMismatch, match="block_size"):
        workers.join(replace(record("e"), agent=agent("e", layout=WIDE)), ())
    with pytest.raises(LayoutMismatch, match="block_size"):
        workers.join(wide_prefill(block_size=6), ())
    with pytest.raises(LayoutMismatch, match="dtype"):
        workers.join(wide_prefill(dtype="bfloat16"), ())


def test_the_largest_request_follows_from_the_blocks_of_the_decode_pool() -> None:
    workers = empty_table()
    workers.join(wide_prefill(), ())
    workers.join(record("d"), ())
    room = workers.chosen("d").agent.num_blocks * LAYOUT.block_size
    workers.refuse_oversized(request(prompt=range(1, room + 1), max_tokens=1))
    with pytest.raises(InvalidRequest, match=f"the context of {room + 1} tokens"):
        workers.refuse_oversized(request(prompt=range(1, room + 1), max_tokens=2))


FAST, SLOW = replace(PRIOR, token_s=1e-5), replace(PRIOR, token_s=2e-5)


def costs(workers: WorkerTable) -> dict[str, float]:
    return {record.worker_id: record.view.cost.token_s for record in workers}


def test_a_worker_that_has_measured_nothing_is_priced_like_its_peers() -> None:
    measured = replace(SERVING, step_cost=FAST)
    workers = table(record("d1", load=measured), record("d2"), record("p", ServiceRole.PREFILL))
    assert costs(workers) == {"d1": 1e-5, "d2": 1e-5, "p": 1e-5}
    workers.take_report("p", WorkerChanges(replace(SERVING, step_cost=SLOW)), 1.0)
    workers.join(record("p2", ServiceRole.PREFILL), ())
    assert costs(workers) == {"d1": 1e-5, "d2": 1e-5, "p": 2e-5, "p2": 2e-5}, "of the same role, if there is one"
    workers.take_report("d2", WorkerChanges(replace(SERVING, step_cost=SLOW)), 1.0)
    assert costs(workers)["d2"] == 2e-5, "its own steps count once there are some"


def test_without_any_measurement_the_prior_holds() -> None:
    assert costs(table(record("d"))) == {"d": PRIOR.token_s}


def test_a_sequence_that_goes_on_stays_with_the_decode_worker_that_has_all_but_its_newest_blocks() -> None:
    size = LAYOUT.block_size
    running = request(prompt=range(1, 8 * size + 1))
    blocks = sequence_hashes(running.token_ids, size)
    workers = table(record("P", ServiceRole.PREFILL), record("D0"), record("D1"))
    workers.take_report("P", WorkerChanges(blocks=((blocks, True),)), 0.0)

    def chosen(avoid: frozenset[str] = frozenset()) -> tuple[str | None, str]:
        candidate = workers.choose(hashes_of(running), avoid, 0.0, goes_on=True)
        assert candidate is not None
        return candidate.prefill_worker, candidate.decode_worker

    workers.take_report("D1", WorkerChanges(blocks=((blocks[:5], True),)), 0.0)
    assert chosen()[0] == "P", "D1 lacks more than the newest blocks"
    workers.take_report("D1", WorkerChanges(blocks=((blocks[5:6], True),)), 0.0)
    assert chosen() == (None, "D1")
    assert chosen(frozenset({"D1"})) == ("P", "D0")
