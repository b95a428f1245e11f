"""The router's connection to a worker sends changes of peers in order, one call at a time. Every fault of a call, of a
report or of the router itself ends in an event for the machine."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from core.errors import TransferFailed, WorkerUnavailable
from core.handoff import LIVE_STATES
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from protos import report_codec
from router.requests.events import (
    DecodeReturned,
    HandOver,
    PrefillReturned,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from tandem_client.stubs import worker_pb2
from tests.support.driven_worker import address
from tests.unit.router.fake_reports import FakeWorker, snapshot

UNKNOWN_VALUE: Any = 99  # of an enum; a later version may define it


async def test_a_change_that_arrives_as_a_call_ends_is_sent_with_the_next_call(worker: FakeWorker) -> None:
    worker.later_changes = [[PeerLeft("c")], [PeerLeft("d")]]
    worker.link.update_peers([PeerLeft("a"), PeerLeft("b")])
    async with asyncio.timeout(5):
        while len(worker.told) < 3:
            await asyncio.sleep(0)
    assert worker.told == [["a", "b"], ["c"], ["d"]]


REQUEST = Request("r#1", (1, 2, 3), 3, SamplingParams(max_tokens=8))


async def test_an_answer_that_cannot_be_read_is_a_retryable_error(worker: FakeWorker) -> None:
    worker.finish_reason = UNKNOWN_VALUE
    await worker.joins()
    worker.link.start_prefill(StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0, call=2))
    worker.link.start_decode(StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0, call=1))
    ended = [await worker.event(), await worker.event()]
    assert {type(event) for event in ended} == {PrefillReturned, DecodeReturned}
    for event in ended:
        assert isinstance(event.result, WorkerUnavailable)
        assert "finish_reason: 99 is not a FinishReason" in str(event.result)


async def test_an_unexpected_exception_in_a_call_is_an_error_that_is_not_retryable(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protos.codec.encode_sequence", lambda *_: 1 // 0)
    await worker.joins()
    worker.link.start_prefill(StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0, call=2))
    worker.link.start_decode(StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0, call=1))
    ended = [await worker.event(), await worker.event()]
    for event in ended:
        assert not event.result.retryable
        assert str(event.result) == "a call to a worker failed in the router: ZeroDivisionError"


async def test_a_hand_off_that_the_worker_does_not_take_ends_the_decode_call(worker: FakeWorker) -> None:
    await worker.joins()
    worker.link.hand_over(HandOver("r#1", "w", 7, b"kv", timeout_s=60.0))
    ended = await worker.event()
    assert isinstance(ended, DecodeReturned)
    assert ended.dispatch_id == "r#1"
    assert isinstance(ended.result, TransferFailed)


async def test_an_unexpected_exception_in_an_update_of_peers_does_not_stop_the_next_one(worker: FakeWorker) -> None:
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
    worker: FakeWorker, caplog: pytest.LogCaptureFixture, report: worker_pb2.WorkerReport, why: str
) -> None:
    worker.reports.put(report)
    with caplog.at_level(logging.ERROR):
        assert isinstance(await worker.event(), WorkerLost)
    assert [record.getMessage() for record in caplog.records] == [f"worker w cannot join: {why}"]
    assert not worker.link._watching.done()


async def test_a_worker_in_another_role_is_lost_without_an_error(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the supervisor tells the router of the role."""
    await worker.joins()
    for _ in range(3):
        worker.reports.put(snapshot("w", ServiceRole.PREFILL))
    lost = await worker.event()
    assert lost == WorkerLost("w", "the worker serves as prefill worker now")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_after_an_unexpected_exception_the_worker_is_lost_and_joins_by_its_next_snapshot(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.reports.put(snapshot("w"))
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("protos.report_codec.decode_load", lambda _: 1 // 0)
        assert isinstance(await worker.event(), WorkerLost)
    assert "Traceback" in caplog.text
    worker.reports.put(snapshot("w"))
    assert isinstance(await worker.event(), WorkerJoined)


async def test_a_report_without_a_load_keeps_the_load_that_the_link_shows(worker: FakeWorker) -> None:
    load = WorkerLoad(WorkerState.SERVING, num_running=3, ledger=dict.fromkeys(Column, 0))
    load = replace(load, transfers=dict.fromkeys(LIVE_STATES, 0))
    first = snapshot("w")
    first.load.CopyFrom(report_codec.encode_load(load))
    worker.reports.put(first)
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=1))
    joined, reported = await worker.event(), await worker.event()
    assert joined.load == load
    assert reported == WorkerReported("w", WorkerChanges())
    assert worker.link.load == load


async def test_a_snapshot_without_a_load_is_refused(worker: FakeWorker) -> None:
    first = snapshot("w")
    first.ClearField("load")
    worker.reports.put(first)
    assert "load: must be set beside a snapshot" in (await worker.event()).detail
