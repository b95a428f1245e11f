"""What a worker reports of itself: changes, load, speed, transfers and its ledger; and the wire for them."""

from __future__ import annotations

import asyncio
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import WorkerConfig
from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.errors import InvalidRequest
from core.handoff import LIVE_STATES, OWNER_STEPS, PULLER_STEPS, AgentAddress, Location, OwnerState, PullerState
from core.kv_layout import KVLayout
from core.lifecycle import WorkerState
from core.paths import PathState, PathStatus, PeerJoined, PeerLeft
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored, Column
from core.scheduling.ledger import BlockHolder, Claim, SequenceState
from core.scheduling.worker_load import BlockRun, RouterCalls, WorkerChanges, WorkerLoad, size_class
from prefill_worker.machine import PrefillDone
from protos import codec, report_codec
from tandem_client.stubs import worker_pb2
from tests.support.worker_words import WorkerReplay
from worker.prefixes import PrefixRequested
from worker.reported_load import REPORTED_CHANGE, ReportedCost
from worker.reports import MAX_HOLDERS, ReportFeed
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


NOBODY: Any = None  # the call's context, which is not used


def feed_of(num_holders: int, met: list[PeerJoined | PeerLeft | PrefixRequested]) -> ReportFeed:
    holders = [worker_pb2.BlockHolder(name=str(number)) for number in range(num_holders)]
    return ReportFeed(
        WorkerConfig(),
        lambda: worker_pb2.WorkerReport(snapshot=worker_pb2.WorkerSnapshot()),
        worker_pb2.WorkerReport,
        lambda: worker_pb2.DescribeLedgerResponse(worker_id="w", holders=holders),
        met.append,
    )


@pytest.mark.parametrize(
    ("num_holders", "asked_for", "num_listed"),
    [(5, 0, 5), (5, 5, 5), (5, 2, 2), (MAX_HOLDERS + 7, 0, MAX_HOLDERS), (MAX_HOLDERS + 7, 9999, MAX_HOLDERS)],
)
async def test_a_ledger_lists_some_holders_and_counts_others(num_holders: int, asked_for: int, num_listed: int) -> None:
    request = worker_pb2.DescribeLedgerRequest(max_holders=asked_for)
    response = await feed_of(num_holders, []).DescribeLedger(request, NOBODY)
    assert [holder.name for holder in response.holders] == [str(number) for number in range(num_listed)]
    assert response.num_left_out == num_holders - num_listed


def test_a_load_report_counts_transfers_in_every_live_state_and_in_no_ended_state() -> None:
    assert set(LIVE_STATES) == {state for state, steps in (OWNER_STEPS | PULLER_STEPS).items() if steps}
    names = {field.name for field in worker_pb2.TransferCounts.DESCRIPTOR.fields}
    assert names == {state.value for state in LIVE_STATES}
    counts = {state: number for number, state in enumerate(LIVE_STATES, start=1)}
    load = WorkerLoad(
        WorkerState.SERVING, ledger=dict.fromkeys(Column, 0), transfers=counts, num_malformed_messages=8,
        num_dropped_messages=9,
        num_corrupt_blocks=10, num_calls=11, router_calls={"r": RouterCalls(2**40, 7), "q": RouterCalls(3, 4)},
    )  # fmt: skip
    assert report_codec.decode_load(report_codec.encode_load(load)) == load


def test_the_kind_of_a_holder_follows_from_its_state() -> None:
    kinds = {}
    for state in (*SequenceState, *LIVE_STATES):
        wire = codec.encode_holder(BlockHolder(Claim("name", state, (1, 2), since=0.0, peer="p"), 1, 0.25))
        assert worker_pb2.HolderState.Name(wire.state) == f"HOLDER_STATE_{state.name}"
        assert (wire.num_blocks, wire.num_counted, wire.age_ms) == (2, 1, 250.0)
        kinds[state] = worker_pb2.HolderKind.Name(wire.kind)
    assert {kinds[state] for state in SequenceState} == {"HOLDER_KIND_SEQUENCE"}
    assert kinds[OwnerState.OFFERED] == "HOLDER_KIND_OFFER"
    assert kinds[PullerState.RESERVED] == "HOLDER_KIND_PULL"


async def test_news_of_the_fleet_arrives_in_order() -> None:
    met: list[PeerJoined | PeerLeft | PrefixRequested] = []
    news: list[PeerJoined | PeerLeft] = [PeerJoined(agent("p"), True), PeerJoined(agent("d"), False), PeerLeft("p")]
    request = worker_pb2.UpdatePeersRequest(changes=map(codec.encode_change, news))
    await feed_of(0, met).UpdatePeers(request, NOBODY)
    assert met == news
    with pytest.raises(InvalidRequest, match="one of owner, reader and left"):
        codec.decode_change(worker_pb2.PeerChange())


async def test_a_flood_of_news_lets_the_loop_do_other_things_in_between() -> None:
    met: list[PeerJoined | PeerLeft | PrefixRequested] = []
    request = worker_pb2.UpdatePeersRequest(changes=[worker_pb2.PeerChange(left="p")] * 1000)
    telling = asyncio.ensure_future(feed_of(0, met).UpdatePeers(request, NOBODY))
    done = [0]
    while not telling.done():
        await asyncio.sleep(0)
        done.append(len(met))
    assert max(after - before for before, after in pairwise(done)) <= 64
    assert len(met) == 1000


def agent(name: str) -> AgentAddress:
    layout = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
    location = Location("here", on_gpu=True, memory_bytes_per_s=1.5, link_bytes_per_s=2.5, gpu="GPU-1")
    return AgentAddress(name, 7, b"keys", 4096, 32, layout, 20.0, 65_536, location, device=0)


STEP_S = 0.1


def test_every_step_teaches_the_cost_that_the_scheduler_and_the_report_use() -> None:
    worker = WorkerReplay("decode")
    assert worker.machine.load().step_cost == PRIOR
    worker.arrive("a", 6, max=12)
    while worker.plans:
        worker.now += STEP_S
        worker.step()
    fitted = worker.machine.load().step_cost
    assert fitted.seconds(StepWork(1, 10, 0, 0.0)) == pytest.approx(STEP_S, rel=0.05)
    assert worker.core.scheduler.step_cost == fitted


def test_a_step_planned_ahead_lasts_from_the_end_of_the_step_before() -> None:
    worker = WorkerReplay("decode ahead=1", "arrive a 6 max=40")
    for _ in range(30):
        worker.wait(STEP_S)
        worker.step()
    assert worker.core.scheduler.num_steps_in_flight > 0
    assert worker.machine.load().step_cost.seconds(StepWork(1, 20, 0, 0.0)) == pytest.approx(STEP_S, rel=0.05)


def test_a_failed_step_teaches_nothing() -> None:
    worker = WorkerReplay("decode", "arrive a 6", "later 30")
    worker.fail_step()
    assert worker.machine.load().step_cost == PRIOR


def test_small_changes_add_up_to_one_that_is_reported() -> None:
    reported = ReportedCost(PRIOR)
    factors = [1.0 + step * 0.3 * REPORTED_CHANGE for step in range(1, 5)]
    costs = [StepCost(*(value * factor for value in astuple(PRIOR))) for factor in factors]
    assert [reported.update(cost) for cost in costs] == [PRIOR] * 3 + [costs[-1]]


def test_sequences_in_decode_are_counted_with_the_tokens_that_they_attend_to() -> None:
    worker = WorkerReplay("decode", "arrive a 5 max=12", "arrive b 15 first=30")
    assert worker.machine.load().num_decoding == 0, "both are in prefill"
    worker.step()
    load = worker.machine.load()
    assert (load.num_decoding, load.decode_context) == (1, 5)
    assert (load.batch_sequences, load.batch_tokens) == (2, 8)
    worker.run(3)
    load = worker.machine.load()
    assert (load.num_decoding, load.decode_context) == (2, 8 + 15)


def test_a_prompt_that_a_prefill_worker_has_computed_is_no_sequence_in_decode() -> None:
    worker = WorkerReplay("prefill", "arrive a 9")  # a chunk of 8 tokens, and a token that looks like a decode
    assert worker.line("step") == ["step", "  -> step a 8+1", "  -> digests 2"]
    assert worker.machine.load().num_decoding == 0
    worker.step()
    (done,) = worker.of(PrefillDone)
    assert (done.num_tokens, done.num_blocks) == (9, 3)


def test_the_backlog_has_the_seconds_of_each_prompt_in_the_class_of_its_own_size() -> None:
    worker = WorkerReplay("decode blocks=64")
    assert worker.machine.load().prompt_backlog == ()
    worker.arrive("long", 60)
    worker.arrive("short", 7, first=200)
    backlog = worker.machine.load().prompt_backlog
    long_s, short_s = PRIOR.prompt_seconds(60), PRIOR.prompt_seconds(7)
    assert len(backlog) == size_class(long_s) + 1
    assert backlog[-1] == pytest.approx(long_s)
    assert backlog[size_class(short_s)] == pytest.approx(short_s)
    assert sum(backlog) == pytest.approx(long_s + short_s)


def test_blocks_of_an_ended_sequence_are_counted_as_released() -> None:
    worker = WorkerReplay("decode", "arrive a 6 max=12", "step")
    held = worker.ledger["held"]
    assert worker.machine.load().num_released_blocks == 0
    worker.step(a=63)
    assert worker.machine.load().num_released_blocks == held > 0
