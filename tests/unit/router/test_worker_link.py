"""The router's connection to a worker sends changes of peers in order, one call at a time. Every fault of a call, of a
report or of the router itself ends in an event for the machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from core.errors import WorkerUnavailable
from core.handoff import LIVE_STATES
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.service import Endpoint
from protos import report_codec
from router.links.worker_link import WorkerLink
from router.requests.events import (
    DecodeReturned,
    PrefillReturned,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from runtime.rpc.security import OPEN
from tandem_client.stubs import worker_pb2
from tests.support.driven_worker import address
from tests.unit.router.fake_reports import Reports, Tokens, snapshot

UNKNOWN_VALUE: Any = 99  # of an enum; a later version may define it


class Worker:
    """Keeps the changes of each UpdatePeers call in `told`. As a call ends, the link gets the next `later_changes`."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.later_changes: list[list[PeerLeft]] = []
        self.link: WorkerLink | None = None
        self.posted: asyncio.Queue[Any] = asyncio.Queue()  # to the router's machine
        self.reports = Reports()
        self.token_streams: list[Tokens] = []
        self.stream_ids: list[int] = []

    async def UpdatePeers(self, request: worker_pb2.UpdatePeersRequest, **_: object) -> worker_pb2.UpdatePeersResponse:
        self.told.append([change.left for change in request.changes])
        assert self.link is not None
        if self.later_changes:
            asyncio.get_running_loop().call_soon(self.link.update_peers, self.later_changes.pop(0))
        return worker_pb2.UpdatePeersResponse()

    async def Prefill(self, _: worker_pb2.PrefillRequest, **__: object) -> worker_pb2.PrefillResponse:
        return worker_pb2.PrefillResponse(finish_reason=UNKNOWN_VALUE)

    async def Decode(self, request: worker_pb2.DecodeRequest, **__: object) -> worker_pb2.DecodeFinished:
        assert request.stream_id == self.stream_ids[-1]
        return worker_pb2.DecodeFinished(finish_reason=UNKNOWN_VALUE)

    def StreamTokens(self, request: worker_pb2.StreamTokensRequest, **_: object) -> Tokens:
        self.stream_ids.append(request.stream_id)
        self.token_streams.append(Tokens())
        return self.token_streams[-1]

    def Watch(self, _: worker_pb2.WatchRequest, **__: object) -> Reports:
        return self.reports


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    endpoint = Endpoint("w", "127.0.0.1:1", ServiceRole.DECODE)
    worker.link = link = WorkerLink(endpoint, "router", worker.posted.put_nowait, lambda _: True, OPEN)
    link._worker = link._prefill = link._decode = worker  # type: ignore[assignment]
    yield worker
    await link.close()


async def test_a_change_that_arrives_as_a_call_ends_is_sent_with_the_next_call(worker: Worker) -> None:
    assert worker.link is not None
    worker.later_changes = [[PeerLeft("c")], [PeerLeft("d")]]
    worker.link.update_peers([PeerLeft("a"), PeerLeft("b")])
    async with asyncio.timeout(5):
        while len(worker.told) < 3:
            await asyncio.sleep(0)
    assert worker.told == [["a", "b"], ["c"], ["d"]]


async def joined(worker: Worker) -> None:
    """Wait for the token stream and the snapshot."""
    worker.reports.put(snapshot("w"))
    async with asyncio.timeout(5):
        assert isinstance(await worker.posted.get(), WorkerJoined)


REQUEST = Request("r#1", (1, 2, 3), 3, SamplingParams(max_tokens=8))


async def test_an_answer_that_cannot_be_read_is_a_retryable_error(worker: Worker) -> None:
    assert worker.link is not None
    await joined(worker)
    worker.link.start_prefill(StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0, call=2))
    worker.link.start_decode(StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0, call=1))
    async with asyncio.timeout(5):
        ended = [await worker.posted.get(), await worker.posted.get()]
    assert {type(event) for event in ended} == {PrefillReturned, DecodeReturned}
    for event in ended:
        assert isinstance(event.result, WorkerUnavailable)
        assert "finish_reason: 99 is not a FinishReason" in str(event.result)


async def test_an_unexpected_exception_in_a_call_is_an_error_that_is_not_retryable(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.link is not None
    monkeypatch.setattr("protos.codec.encode_sequence", lambda *_: 1 // 0)
    await joined(worker)
    worker.link.start_prefill(StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0, call=2))
    worker.link.start_decode(StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0, call=1))
    async with asyncio.timeout(5):
        ended = [await worker.posted.get(), await worker.posted.get()]
    for event in ended:
        assert not event.result.retryable
        assert str(event.result) == "a call to a worker failed in the router: ZeroDivisionError"


async def test_an_unexpected_exception_in_an_update_of_peers_does_not_stop_the_next_one(worker: Worker) -> None:
    assert worker.link is not None
    nonsense: Any = "no change of a peer"
    worker.link.update_peers([nonsense])
    await asyncio.sleep(0)
    worker.link.update_peers([PeerLeft("a")])
    async with asyncio.timeout(5):
        while not worker.told:
            await asyncio.sleep(0)
    assert worker.told == [["a"]]


def unreadable_snapshot() -> worker_pb2.WorkerReport:
    report = snapshot("w")
    report.snapshot.role = UNKNOWN_VALUE
    return report


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (unreadable_snapshot(), "role: 99 is not a WorkerRole"),
        (snapshot("other"), "worker_id: 127.0.0.1:1 answers as 'other'"),
    ],
    ids=["that cannot be read", "of another worker"],
)
async def test_the_link_logs_a_refused_snapshot_and_subscribes_again(
    worker: Worker, caplog: pytest.LogCaptureFixture, report: worker_pb2.WorkerReport, why: str
) -> None:
    assert worker.link is not None
    worker.reports.put(report)
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(5):
            assert isinstance(await worker.posted.get(), WorkerLost)
    assert [record.getMessage() for record in caplog.records] == [f"worker w cannot join: {why}"]
    assert not worker.link._watching.done()


async def test_after_an_unexpected_exception_the_worker_is_lost_and_joins_by_its_next_snapshot(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.links.worker_link.RETRY_S", (0.0,))
    worker.reports.put(snapshot("w"))
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("protos.report_codec.decode_load", lambda _: 1 // 0)
        async with asyncio.timeout(5):
            assert isinstance(await worker.posted.get(), WorkerLost)
    assert "Traceback" in caplog.text
    worker.reports.put(snapshot("w"))
    async with asyncio.timeout(5):
        assert isinstance(await worker.posted.get(), WorkerJoined)


async def test_a_report_without_a_load_keeps_the_load_that_the_link_shows(worker: Worker) -> None:
    assert worker.link is not None
    load = WorkerLoad(WorkerState.SERVING, num_running=3, ledger=dict.fromkeys(Column, 0))
    load = replace(load, transfers=dict.fromkeys(LIVE_STATES, 0))
    first = snapshot("w")
    first.load.CopyFrom(report_codec.encode_load(load))
    worker.reports.put(first)
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=1))
    async with asyncio.timeout(5):
        joined, reported = await worker.posted.get(), await worker.posted.get()
    assert joined.load == load
    assert reported == WorkerReported("w", WorkerChanges())
    assert worker.link.load == load


async def test_a_snapshot_without_a_load_is_refused(worker: Worker) -> None:
    first = snapshot("w")
    first.ClearField("load")
    worker.reports.put(first)
    async with asyncio.timeout(5):
        lost = await worker.posted.get()
    assert "load: must be set beside a snapshot" in lost.detail
