"""Worlds in which workers read evicted prefixes from their disks, which outlive them: disks fail, hang and lose blocks,
writes are cut off by the death of their worker. No client gets another token, and no request fails because of a disk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest

from simulator.search.scenario import SLOW_STEP_COST, Scenario, chance_of, make_scenario, with_disks
from simulator.search.simulation import run_scenario
from simulator.shells import disk
from simulator.shells.disk import SimulatedDisk
from simulator.virtual.faults import DiskFaults, Fault
from tests.simulation.test_prefix_from_a_peer import Change, first_failure, sharing
from worker.tier.disk_tier import DiskTier
from worker.tier.events import BlocksRead, ReadBlocks, ReadEnd

NUM_TOKENS = 240  # of a pool: prefixes leave it
SEEDS = range(16)
FAULTY = DiskFaults(seconds_per_block=0.008, failed=0.1, damaged=0.1, hung=0.1)


def small(scenario: Scenario, *, faults: bool = False) -> Scenario:
    """Prompts with long common beginnings, in pools that cannot keep them, on workers without peers to ask."""
    scenario = with_disks(chance_of(f"disks of {scenario.seed}"), sharing(scenario, faults=faults))
    workers = tuple(
        replace(
            spec,
            num_blocks=NUM_TOKENS // spec.layout.block_size,
            disk_slots=100,
            disk=FAULTY if faults else DiskFaults(),
            step_cost=SLOW_STEP_COST,
        )
        for spec in scenario.workers
    )
    deaths = tuple(Fault("dies", spec.worker_id, 0.9 + 0.3 * place, 0.2) for place, spec in enumerate(workers))
    return replace(
        scenario,
        workers=workers,
        router=replace(scenario.router, peer_prefixes="never"),
        faults=(*scenario.faults, *deaths) if faults else (),
    )


WITH_FAULTS: Change = partial(small, faults=True)


@cache
def counts_of(change: Change) -> Counter[str]:
    totals: Counter[str] = Counter()
    for seed in SEEDS:
        totals += run_scenario(change(make_scenario(seed))).counts
    return totals


def test_prefixes_come_from_disk_and_no_request_gets_a_wrong_token() -> None:
    counts = counts_of(small)
    assert counts["disk read complete"] > 10
    assert counts["block from disk"] > 50


def test_nor_does_one_where_disks_fail_and_workers_die() -> None:
    counts = counts_of(WITH_FAULTS)
    for fault in ("disk failed", "damaged slot", "torn write", "dies", *(f"disk read {end.value}" for end in ReadEnd)):
        assert counts[fault] > 0, f"{fault} never happened"


# ---- machines and disks broken on purpose


def test_a_disk_that_does_not_compare_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def anything(self: SimulatedDisk, action: ReadBlocks, num_read: int) -> list[list[int] | None]:
        found = [self._slots.get(read.slot) for read in action.reads[:num_read]]
        return [None if kept is None else kept[1][::-1] for kept in found]

    monkeypatch.setattr(SimulatedDisk, "_found", anything)
    assert "is right" in first_failure(small)


def test_a_worker_that_uses_blocks_that_did_not_arrive_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    on_read = DiskTier.on_read

    def all_of_them(self: DiskTier, event: BlocksRead, now: float) -> object:
        num_asked = len(self._reads[event.read_id].reads)
        return on_read(self, replace(event, num_read=num_asked, end=ReadEnd.COMPLETE), now)

    monkeypatch.setattr(DiskTier, "on_read", all_of_them)
    assert "is right" in first_failure(WITH_FAULTS)


def test_a_worker_that_does_not_hold_what_is_copied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence writes into the block before it is copied, and a later prompt gets that KV."""
    monkeypatch.setattr(disk, "COPY_S", 0.5)
    monkeypatch.setattr(DiskTier, "_pin", lambda *_: None)
    assert "is right" in first_failure(small)
