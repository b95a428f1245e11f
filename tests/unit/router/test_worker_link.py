"""The router's line to a worker: news of the fleet is told in order, one call at a time, and none is left behind. What
a worker of another version says is an error with an end, and no silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from core.errors import WorkerUnavailable
from core.lifecycle import ServiceRole
from core.paths import PeerDismissed
from core.request import Request, SamplingParams
from core.service import Endpoint
from protos import worker_pb2
from router.events import DecodeReturned, PrefillReturned, StartDecode, StartPrefill, WorkerLost
from router.worker_link import WorkerLink
from runtime.security import OPEN
from tests.support.driven_worker import address

UNHEARD_OF: Any = 99  # a value that a later version may have given a meaning


class Worker:
    """What the worker is told; `and_then` happens as a call ends, before anybody has noticed that it has."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.and_then: list[list[PeerDismissed]] = []
        self.link: WorkerLink | None = None
        self.posted: asyncio.Queue[Any] = asyncio.Queue()  # to the router's machine
        self.reports: list[worker_pb2.WorkerReport] = []

    async def MeetPeers(self, request: worker_pb2.MeetPeersRequest, **_: object) -> worker_pb2.MeetPeersResponse:
        self.told.append([change.gone for change in request.changes])
        assert self.link is not None
        if self.and_then:
            asyncio.get_running_loop().call_soon(self.link.introduce, self.and_then.pop(0))
        return worker_pb2.MeetPeersResponse()

    async def Prefill(self, _: worker_pb2.PrefillRequest, **__: object) -> worker_pb2.PrefillResponse:
        return worker_pb2.PrefillResponse(finish_reason=UNHEARD_OF)

    async def Decode(self, _: worker_pb2.DecodeRequest, **__: object) -> AsyncIterator[worker_pb2.DecodeResponse]:
        yield worker_pb2.DecodeResponse(finished=worker_pb2.DecodeFinished(finish_reason=UNHEARD_OF))

    def Watch(self, _: worker_pb2.WatchRequest, **__: object) -> Reports:
        return Reports(self.reports)


class Reports:
    """A stream of them, as grpc.aio has it."""

    def __init__(self, reports: list[worker_pb2.WorkerReport]) -> None:
        self._reports = iter(reports)

    def __aiter__(self) -> Reports:
        return self

    async def __anext__(self) -> worker_pb2.WorkerReport:
        for report in self._reports:
            return report
        return await asyncio.Future()  # it has nothing more to say

    def cancel(self) -> None:
        pass


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    endpoint = Endpoint("w", "127.0.0.1:1", ServiceRole.DECODE)
    worker.link = link = WorkerLink(endpoint, "router", worker.posted.put_nowait, lambda _: True, OPEN)
    link._worker = link._prefill = link._decode = worker
    yield worker
    await link.close()


async def test_news_that_comes_as_a_call_ends_is_told_by_the_next_one(worker: Worker) -> None:
    assert worker.link is not None
    worker.and_then = [[PeerDismissed("c")], [PeerDismissed("d")]]
    worker.link.introduce([PeerDismissed("a"), PeerDismissed("b")])
    async with asyncio.timeout(5):
        while len(worker.told) < 3:
            await asyncio.sleep(0)
    assert worker.told == [["a", "b"], ["c"], ["d"]]


REQUEST = Request("r#1", (1, 2, 3), 3, SamplingParams(max_tokens=8))


async def test_an_answer_that_cannot_be_read_ends_its_call_and_another_worker_may_be_tried(worker: Worker) -> None:
    assert worker.link is not None
    worker.link.start_prefill(StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0), [])
    worker.link.start_decode(StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0), [])
    async with asyncio.timeout(5):
        ended = [await worker.posted.get(), await worker.posted.get()]
    assert {type(event) for event in ended} == {PrefillReturned, DecodeReturned}
    for event in ended:
        assert isinstance(event.result, WorkerUnavailable)
        assert "finish_reason: 99 is not a FinishReason" in str(event.result)


async def test_a_worker_whose_snapshot_cannot_be_read_is_told_of_and_watched_on(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker.link is not None
    load = worker_pb2.LoadReport(state=worker_pb2.WORKER_STATE_SERVING)
    worker.reports = [worker_pb2.WorkerReport(snapshot=worker_pb2.WorkerSnapshot(role=UNHEARD_OF), load=load)]
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(5):
            assert isinstance(await worker.posted.get(), WorkerLost)
    assert [record.getMessage() for record in caplog.records] == ["worker w cannot join: role: 99 is not a WorkerRole"]
    assert not worker.link._watching.done()
