"""Workers of two versions of the hand-off protocol serve side by side: the router pairs only workers of one version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import RouterConfig
from core.errors import MemoryMismatch
from core.handoff import PROTOCOL_VERSION, DevicePath, PoolAccess
from core.lifecycle import ServiceRole
from router.requests.peer_discovery import announce_join, announce_leave
from router.routing.policy import SecondsPolicy
from router.routing.worker_record import WorkerRecord
from router.routing.workers import WorkerTable, hashes_of
from tests.unit.router.driving_router import SERVING, agent, request

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
OLD, NEW = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
NOBODY: frozenset[str] = frozenset()
PROMPT = hashes_of(request("r"))


def worker(name: str, role: ServiceRole, version: int) -> WorkerRecord:
    return WorkerRecord(name, role, replace(agent(name), protocol_version=version), SERVING, 0.0, "router", 2)


def table(*records: WorkerRecord, local_prefill: str = "auto") -> WorkerTable:
    config = RouterConfig(local_prefill=local_prefill)
    workers = WorkerTable(config, SecondsPolicy(config))
    for record in records:
        workers.join(record, ())
    workers.check()
    return workers


def pairs(workers: WorkerTable, avoid: frozenset[str] = NOBODY) -> set[tuple[str | None, str]]:
    found = workers.candidates(PROMPT, avoid, 0.0)
    assert workers.choose(PROMPT, avoid, 0.0) == (found[0] if found else None)
    assert set(workers.compared) == set(found) or not found
    assert found[1:] == sorted(found[1:], key=lambda candidate: candidate.order)
    return {(candidate.prefill_worker, candidate.decode_worker) for candidate in found}


BOTH = (worker("p-old", P, OLD), worker("d-old", D, OLD), worker("p-new", P, NEW), worker("d-new", D, NEW))


def test_only_workers_of_one_version_are_paired() -> None:
    alone: set[tuple[str | None, str]] = {(None, "d-old"), (None, "d-new")}
    assert pairs(table(*BOTH)) == {("p-old", "d-old"), ("p-new", "d-new")} | alone
    assert pairs(table(*BOTH, local_prefill="never")) == {("p-old", "d-old"), ("p-new", "d-new")}


def test_many_workers_of_one_version_hide_no_pair_of_the_other() -> None:
    """The policy compares pairs of the cheapest few workers of each pool."""
    many = [worker(f"a-p-old-{number}", P, OLD) for number in range(20)]
    assert ("p-new", "d-new") in pairs(table(*many, *BOTH, local_prefill="never"))


def test_a_decode_worker_without_a_prefill_worker_of_its_version_computes_prompts_itself() -> None:
    """Also where prompts should not run there: else the request would wait for ever."""
    workers = table(worker("p-old", P, OLD), worker("d-old", D, OLD), worker("d-new", D, NEW), local_prefill="never")
    assert pairs(workers) == {("p-old", "d-old"), (None, "d-new")}


def test_a_failed_worker_of_one_version_is_avoided_while_another_version_serves() -> None:
    assert pairs(table(*BOTH, local_prefill="never"), frozenset({"d-old"})) == {("p-new", "d-new")}


def test_no_decode_worker_of_any_version_means_no_candidate() -> None:
    assert pairs(table(worker("p-old", P, OLD), worker("p-new", P, NEW))) == set()


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_worker_learns_only_of_peers_of_its_version(version: int) -> None:
    joining = worker("d-2", D, version)
    peer = {OLD: "p-old", NEW: "p-new"}[version]
    assert {update.worker_id for update in announce_join(joining, BOTH)} == {"d-2", peer}
    assert {update.worker_id for update in announce_leave(joining, BOTH)} == {peer}


def test_memories_without_a_path_between_them_refuse_only_workers_that_could_be_paired() -> None:
    on_gpu = PoolAccess(0, frozenset({DevicePath.MAPPED, DevicePath.STAGED}))
    workers = table(worker("d-old", D, OLD))
    for name, version in (("p-new", NEW), ("p-old", OLD)):
        prefill = worker(name, P, version)
        joining = replace(prefill, agent=replace(prefill.agent, access=on_gpu))
        if version == NEW:
            workers.join(joining, ())
            continue
        with pytest.raises(MemoryMismatch):
            workers.join(joining, ())
    assert pairs(workers) == {(None, "d-old")}
