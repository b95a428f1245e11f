"""The reports of a worker: its load with transfers by state, and its ledger, up to a requested length."""

from __future__ import annotations

from typing import Any

import pytest

from core.config import WorkerConfig
from core.errors import InvalidRequest
from core.handoff import (
    LIVE_STATES,
    OWNER_STEPS,
    PULLER_STEPS,
    AgentAddress,
    Location,
    OwnerState,
    PullerState,
)
from core.kv_layout import KVLayout
from core.lifecycle import WorkerState
from core.paths import PeerJoined, PeerLeft
from core.scheduling.block_pool import Column
from core.scheduling.ledger import BlockHolder, Claim, SequenceState
from core.scheduling.worker_load import RouterCalls, WorkerLoad
from protos import codec, report_codec
from tandem_client.stubs import worker_pb2
from worker.prefixes import PrefixRequested
from worker.reports import MAX_HOLDERS, ReportFeed

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
async def test_a_ledger_lists_the_first_holders_and_counts_the_others(
    num_holders: int, asked_for: int, num_listed: int
) -> None:
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


def agent(name: str) -> AgentAddress:
    layout = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
    location = Location("here", on_gpu=True, memory_bytes_per_s=1.5, link_bytes_per_s=2.5, gpu="GPU-1")
    return AgentAddress(name, 7, b"keys", 4096, 32, layout, 20.0, 65_536, location, device=0)
