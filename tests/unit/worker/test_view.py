"""The changes that a worker reports, and their way over the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.handoff import LIVE_STATES
from core.lifecycle import WorkerState
from core.paths import PathState, PathStatus
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored, Column
from core.scheduling.worker_load import BlockRun, RouterCalls, WorkerChanges, WorkerLoad
from protos import report_codec
from tandem_client.stubs import worker_pb2
from worker.view import ChangeTracker

LOAD = WorkerLoad(
    WorkerState.SERVING,
    ledger=dict.fromkeys(Column, 0),
    transfers=dict.fromkeys(LIVE_STATES, 0),
    router_calls={"r": RouterCalls(7, 2)},
)
P, Q = PathStatus("p", PathState.FINE), PathStatus("q", PathState.FINE)


def test_the_first_changes_are_everything_and_then_there_are_none() -> None:
    tracker = ChangeTracker()
    events: list[BlockEvent] = [BlockStored(1), BlockStored(2), BlockRemoved(1), BlockStored(3)]
    assert tracker.take(LOAD, events, (P,)) == WorkerChanges(
        LOAD, (([1, 2], True), ([1], False), ([3], True)), (P,), ()
    )
    assert tracker.take(LOAD, [], (P,)) is None


def test_each_part_is_reported_only_if_it_has_changed() -> None:
    tracker = ChangeTracker()
    tracker.take(LOAD, [], (P,))
    busier = replace(LOAD, num_running=1)
    assert tracker.take(busier, [], (P,)) == WorkerChanges(load=busier)
    assert tracker.take(busier, [BlockRemoved(5)], (P,)) == WorkerChanges(blocks=(([5], False),))
    assert tracker.take(busier, [], (P, Q)) == WorkerChanges(paths=(Q,))
    slow = replace(P, state=PathState.SLOW)
    assert tracker.take(busier, [], (slow,)) == WorkerChanges(paths=(slow,), removed_paths=("q",))


RUNS = st.lists(st.tuples(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), st.booleans()), max_size=6)


@given(RUNS, st.booleans(), st.lists(st.sampled_from([P, Q]), max_size=2, unique=True))
def test_changes_arrive_as_they_were_sent(runs: list[BlockRun], with_load: bool, paths: list[PathStatus]) -> None:
    sent = WorkerChanges(LOAD if with_load else None, tuple(runs), tuple(paths), ("gone",))
    wire = report_codec.encode_changes(sent).SerializeToString()
    arrived = report_codec.decode_changes(worker_pb2.WorkerReport.FromString(wire))
    assert replace(arrived, blocks=()) == replace(sent, blocks=())
    assert _flat(arrived.blocks) == _flat(sent.blocks)


def _flat(runs: tuple[BlockRun, ...]) -> list[tuple[int, bool]]:
    return [(sequence_hash, is_stored) for hashes, is_stored in runs for sequence_hash in hashes]


def test_no_change_is_a_few_bytes() -> None:
    assert len(worker_pb2.WorkerReport(sequence_number=10**6).SerializeToString()) < 8
    assert report_codec.decode_changes(worker_pb2.WorkerReport(sequence_number=1)) == WorkerChanges()


@pytest.mark.parametrize("runs", [[], [1], [1, 1, 1], [4]])
def test_runs_that_do_not_sum_to_the_blocks_are_refused(runs: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="block_runs"):
        report_codec.decode_changes(worker_pb2.WorkerReport(block_changes=[1, 2], block_runs=runs))
