"""WorkerTable: the workers that can take a request, and the router's view of their load, caches and versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.block_hash import sequence_hashes
from core.config import RouterConfig
from core.cost.step_cost import PRIOR
from core.errors import LayoutMismatch
from core.handoff import PROTOCOL_VERSION
from core.lifecycle import ServiceRole
from core.scheduling.block_pool import Column
from core.scheduling.sequence import Sequence
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from protos import codec
from router.requests.peer_discovery import announce_join, announce_leave
from router.routing.policy import SecondsPolicy
from router.routing.question import Candidate
from router.routing.worker_record import WorkerRecord
from router.routing.workers import REUSE_WEIGHT, WorkerTable, hashes_of
from tests.unit.router.driving_router import LAYOUT, SERVING, agent, request

NOBODY: frozenset[str] = frozenset()
CONFIG = RouterConfig(report_stale_s=3.0, max_in_flight_per_worker=2)


def empty_table(config: RouterConfig = CONFIG) -> WorkerTable:
    return WorkerTable(config, SecondsPolicy(config))


def record(name: str, role: ServiceRole = ServiceRole.DECODE, load: WorkerLoad = SERVING) -> WorkerRecord:
    return WorkerRecord(name, role, agent(name), load, 0.0, "router", CONFIG.max_in_flight(False))


def table(*records: WorkerRecord, config: RouterConfig = CONFIG) -> WorkerTable:
    workers = empty_table(config)
    for joining in records:
        workers.join(joining, ())
    workers.check()
    return workers


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("quantization", "int8")])
def test_a_worker_whose_layout_differs_is_refused_unless_it_is_alone(field: str, value: str) -> None:
    workers = table(record("d"))
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=field):
        workers.join(replace(record("e"), agent=agent("e", layout=other)), ())
    workers.join(replace(record("d"), agent=agent("d", layout=other)), ())
    assert workers.chosen("d").agent.layout == other


def test_the_index_forgets_the_blocks_of_a_worker_that_leaves() -> None:
    workers = empty_table()
    workers.join(record("d"), [1, 2])
    left = workers.leave("d", 0.0)
    assert left is not None
    assert workers.index.match([1, 2]) == {}
    assert workers.leave("d", 0.0) is None


def test_a_prompt_is_hashed_once_a_decode_worker_has_room_and_to_the_first_block_that_no_worker_has() -> None:
    workers = empty_table()
    prompt = hashes_of(request(prompt=range(1, 41)))
    assert workers.candidates(prompt, NOBODY, 0.0) == []
    workers.join(record("d"), sequence_hashes(range(1, 41), LAYOUT.block_size)[:3])
    workers.suspect("d")
    assert workers.choose(prompt, NOBODY, 0.0) is None
    assert prompt.chain(LAYOUT.block_size).num_computed == 0
    workers.take_report("d", WorkerChanges(SERVING), 0.0)
    assert workers.choose(prompt, NOBODY, 0.0) is not None
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
        (found,) = [c for c in workers.candidates(hashes_of(prompt), NOBODY, 0.0) if c.prefill_worker == "p"]
        return found

    assert (pair().cached_tokens, pair().transfer_blocks) == (8, 1), "the decode worker lacks its last block of four"
    workers.join(record("d"), narrow[:1])
    assert pair().transfer_blocks == 3, "counted in the decode worker's blocks of 4 tokens"


def test_the_reuse_share_is_that_of_the_prompts_that_were_dispatched() -> None:
    prompt = hashes_of(request(prompt=range(1, 13)))
    workers = table(record("d"), record("e"))
    workers.join(record("d"), list(prompt.chain(LAYOUT.block_size))[:2])  # 8 of 12 tokens
    workers.candidates(prompt, NOBODY, 0.0)
    assert workers.reuse_share == 0.0, "an answer to `tandem explain` changes nothing"
    assert workers.choose(prompt, NOBODY, 0.0)
    assert workers.reuse_share == pytest.approx(8 / 12 * REUSE_WEIGHT)
    for _ in range(500):
        workers.choose(prompt, NOBODY, 0.0)
    assert workers.reuse_share == pytest.approx(8 / 12, rel=0.01)


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


def test_a_sequence_that_goes_on_stays_with_the_decode_worker_that_has_all_but_its_newest_blocks() -> None:
    size = LAYOUT.block_size
    running = request(prompt=range(1, 8 * size + 1))
    blocks = sequence_hashes(running.token_ids, size)
    workers = table(record("P", ServiceRole.PREFILL), record("D0"), record("D1"))
    workers.take_report("P", WorkerChanges(blocks=((blocks, True),)), 0.0)

    def chosen(avoid: frozenset[str] = NOBODY) -> tuple[str | None, str]:
        candidate = workers.choose(hashes_of(running), avoid, 0.0, goes_on=True)
        assert candidate is not None
        return candidate.prefill_worker, candidate.decode_worker

    workers.take_report("D1", WorkerChanges(blocks=((blocks[:5], True),)), 0.0)
    assert chosen()[0] == "P", "D1 lacks more than the newest blocks"
    workers.take_report("D1", WorkerChanges(blocks=((blocks[5:6], True),)), 0.0)
    assert chosen() == (None, "D1")
    assert chosen(frozenset({"D1"})) == ("P", "D0")


# ---- records of workers


def released_per_s(*reports: tuple[float, int, int]) -> float:
    """Blocks, after reports of (time, blocks held, blocks released since the start)."""
    worker = WorkerRecord("d", ServiceRole.DECODE, agent("d"), SERVING, 0.0, "router", 2)
    for worker.reported_at, num_held, num_released in reports:
        worker.take_load(replace(SERVING, ledger={Column.HELD: num_held}, num_released_blocks=num_released))
    return worker.view.blocks_released_per_s


def test_time_without_requests_does_not_slow_the_release() -> None:
    """A worker that holds blocks for ten seconds releases a tenth of them each second."""
    steady = [(float(second), 200, 20 * second) for second in range(60)]
    assert released_per_s(*steady) == pytest.approx(20.0, rel=0.02)
    idle = [(60.0 + second, 0, 1400) for second in range(300)]
    assert released_per_s(*steady, *idle) == 0.0, "nothing is held"
    assert released_per_s(*steady, *idle, (400.0, 200, 1400)) == pytest.approx(20.0, rel=0.4)


def test_a_view_has_the_time_of_its_load_and_not_of_a_later_report_without_one() -> None:
    worker = WorkerRecord("d", ServiceRole.DECODE, agent("d"), SERVING, 5.0, "router", 2)
    assert worker.view.reported_at == 5.0
    worker.reported_at = 6.0
    worker.refresh()
    assert worker.view.reported_at == 5.0, "the load is unchanged since then"
    worker.reported_at = 7.0
    worker.take_load(SERVING)
    assert worker.view.reported_at == 7.0


# ---- versions of the hand-off protocol: the router pairs only workers of one version

OLD, NEW = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
EITHER, NEVER_LOCAL = RouterConfig(local_prefill="auto"), RouterConfig(local_prefill="never")
PROMPT = hashes_of(request("r"))


def of_version(name: str, version: int) -> WorkerRecord:
    role = ServiceRole.PREFILL if name.startswith("p") else ServiceRole.DECODE
    return replace(record(name, role), agent=replace(agent(name), protocol_version=version))


def pairs(workers: WorkerTable, avoid: frozenset[str] = NOBODY) -> set[tuple[str | None, str]]:
    found = workers.candidates(PROMPT, avoid, 0.0)
    assert workers.choose(PROMPT, avoid, 0.0) == (found[0] if found else None)
    assert set(workers.compared) == set(found) or not found
    assert found[1:] == sorted(found[1:], key=lambda candidate: candidate.order)
    return {(candidate.prefill_worker, candidate.decode_worker) for candidate in found}


BOTH = (of_version("p-old", OLD), of_version("d-old", OLD), of_version("p-new", NEW), of_version("d-new", NEW))


def test_only_workers_of_one_version_are_paired() -> None:
    both: set[tuple[str | None, str]] = {("p-old", "d-old"), ("p-new", "d-new")}
    assert pairs(table(*BOTH, config=EITHER)) == both | {(None, "d-old"), (None, "d-new")}
    assert pairs(table(*BOTH, config=NEVER_LOCAL)) == both


def test_many_workers_of_one_version_hide_no_pair_of_the_other() -> None:
    """The policy compares pairs of the cheapest few workers of each pool."""
    many = [of_version(f"p-{number}", OLD) for number in range(20)]
    assert ("p-new", "d-new") in pairs(table(*many, *BOTH, config=NEVER_LOCAL))


def test_a_decode_worker_without_a_prefill_worker_of_its_version_computes_prompts_itself() -> None:
    """Also where prompts should not run there: else the request would wait for ever."""
    p_old, d_old, _, d_new = BOTH
    assert pairs(table(p_old, d_old, d_new, config=NEVER_LOCAL)) == {("p-old", "d-old"), (None, "d-new")}


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_worker_learns_only_of_peers_of_its_version(version: int) -> None:
    joining = of_version("d-2", version)
    peer = {OLD: "p-old", NEW: "p-new"}[version]
    assert {update.worker_id for update in announce_join(joining, BOTH)} == {"d-2", peer}
    assert {update.worker_id for update in announce_leave(joining, BOTH)} == {peer}


def test_the_version_of_a_worker_reaches_the_router() -> None:
    sent = of_version("d", NEW).agent
    assert codec.decode_agent(codec.encode_agent(sent)) == sent


def test_a_worker_that_says_nothing_of_quantization_has_none() -> None:
    wire = codec.encode_layout(LAYOUT)
    wire.ClearField("quantization")
    assert codec.decode_layout(wire) == LAYOUT
