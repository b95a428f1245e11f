"""The router's line to a worker: news of the fleet is told in order, one call at a time, and none is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from core.lifecycle import WorkerRole
from core.paths import PeerDismissed
from protos import worker_pb2
from router.worker_link import WorkerLink
from runtime.security import OPEN
from runtime.service import Endpoint


class Worker:
    """What the worker is told; `and_then` happens as a call ends, before anybody has noticed that it has."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.and_then: list[list[PeerDismissed]] = []
        self.link: WorkerLink | None = None

    async def MeetPeers(self, request: worker_pb2.MeetPeersRequest, **_: object) -> worker_pb2.MeetPeersResponse:
        self.told.append([change.gone for change in request.changes])
        assert self.link is not None
        if self.and_then:
            asyncio.get_running_loop().call_soon(self.link.introduce, self.and_then.pop(0))
        return worker_pb2.MeetPeersResponse()


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    endpoint = Endpoint("w", "127.0.0.1:1", WorkerRole.DECODE)
    worker.link = link = WorkerLink(endpoint, "router", lambda _: None, lambda _: False, OPEN)
    link._worker = worker
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
