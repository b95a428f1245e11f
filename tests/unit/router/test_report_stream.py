"""The router's end of a report stream: what is out of step is not used, and the stream starts again with a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from core.service import Endpoint
from protos import report_codec
from router.links.worker_link import WorkerLink
from router.requests.events import WorkerJoined, WorkerLost, WorkerReported
from runtime.rpc.security import OPEN
from tandem_client.stubs import worker_pb2
from tests.unit.router.fake_reports import Reports, Tokens, load, snapshot


class Worker:
    """Each Watch call takes the next entry of `streams`; after the last one the worker does not answer."""

    def __init__(self) -> None:
        self.streams: list[Reports] = []
        self.num_calls = 0
        self.posted: asyncio.Queue[Any] = asyncio.Queue()  # to the router's machine
        self.known = True  # to the router's machine
        self.link: WorkerLink | None = None

    def is_followed(self, *streams: Reports) -> None:
        """From now on, by a router."""
        self.streams += streams
        endpoint = Endpoint("w", "127.0.0.1:1", ServiceRole.DECODE)
        self.link = WorkerLink(endpoint, "router", self.posted.put_nowait, lambda _: self.known, OPEN)
        self.link._worker = self.link._decode = self  # type: ignore[assignment]

    def Watch(self, _: worker_pb2.WatchRequest, **__: object) -> Reports:
        self.num_calls += 1
        return self.streams.pop(0) if self.streams else Reports()

    def StreamTokens(self, _: worker_pb2.StreamTokensRequest, **__: object) -> Tokens:
        return Tokens()

    async def next_event(self) -> Any:
        async with asyncio.timeout(5):
            return await self.posted.get()


class Broken(Reports):
    """It breaks after the reports that the test has put in."""

    async def __anext__(self) -> worker_pb2.WorkerReport:
        if not self._reports.empty():
            return await self._reports.get()
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "it is gone", None)


@pytest_asyncio.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr("router.links.worker_link.RETRY_S", (0.0,))
    worker = Worker()
    yield worker
    assert worker.link is not None
    await worker.link.close()


def report(number: int) -> worker_pb2.WorkerReport:
    return worker_pb2.WorkerReport(
        sequence_number=number,
        load=load(),
        block_changes=[number],
        block_runs=[1],
    )


def stream_of(*reports: worker_pb2.WorkerReport) -> Reports:
    """It stays open after the last one."""
    stream = Reports()
    for each in reports:
        stream.put(each)
    return stream


@pytest.mark.parametrize(
    "numbers", [(0, 1, 3), (0, 1, 1), (0, 1, 0), (0, 1, 2**40)], ids=["lost", "doubled", "restarted", "far ahead"]
)
async def test_after_a_gap_nothing_is_used_before_the_next_snapshot(worker: Worker, numbers: tuple[int, ...]) -> None:
    first, *others = numbers
    assert first == 0
    out_of_step = stream_of(snapshot("w"), *map(report, others))
    worker.is_followed(out_of_step, stream_of(snapshot("w"), report(1)))
    events = [await worker.next_event() for _ in range(4)]
    assert [type(event) for event in events] == [WorkerJoined, WorkerReported, WorkerJoined, WorkerReported]
    assert events[1].changes.blocks == events[3].changes.blocks == (([1], True),)
    assert worker.num_calls == 2
    assert worker.posted.empty()


async def test_a_stream_whose_snapshot_is_missing_starts_again(worker: Worker) -> None:
    worker.is_followed(stream_of(report(1)), stream_of(snapshot("w")))
    assert isinstance(await worker.next_event(), WorkerJoined)
    assert worker.num_calls == 2


async def test_a_worker_that_the_machine_has_given_up_joins_again_by_its_next_report(worker: Worker) -> None:
    stream = stream_of(snapshot("w"))
    worker.is_followed(stream, stream_of(snapshot("w")))
    assert isinstance(await worker.next_event(), WorkerJoined)
    worker.known = False  # silent for too long
    stream.put(report(1))
    assert isinstance(await worker.next_event(), WorkerJoined)


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_a_worker_is_lost_when_the_second_call_fails_too(worker: Worker, num_failures: int) -> None:
    """A worker that cuts off a slow router still serves the calls of the router."""
    worker.is_followed(*(Broken() for _ in range(num_failures)), stream_of(snapshot("w")))
    event = await worker.next_event()
    if num_failures == 2:
        assert isinstance(event, WorkerLost)
        assert "it is gone" in event.detail
        event = await worker.next_event()
    assert isinstance(event, WorkerJoined)


async def test_a_router_that_is_cut_off_now_and_then_never_loses_the_worker(worker: Worker) -> None:
    """Only failures without a report between them count."""
    broken = [Broken() for _ in range(4)]
    for stream in broken:
        stream.put(snapshot("w"))
    worker.is_followed(*broken, stream_of(snapshot("w")))
    assert {type(await worker.next_event()) for _ in range(5)} == {WorkerJoined}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_cost": worker_pb2.StepCost(step_s=float("nan"))},
        {"step_cost": worker_pb2.StepCost(step_s=0.004, token_s=float("inf"))},
        {"step_cost": worker_pb2.StepCost(step_s=-0.004)},
        {"step_cost": None},
        {"prompt_backlog": [float("inf")]},
    ],
)
def test_a_load_of_impossible_seconds_is_refused(wrong: dict[str, Any]) -> None:
    """The next request would end the router, and its restart, and every other router."""
    with pytest.raises(InvalidRequest) as refused:
        report_codec.decode_load(load(**wrong))
    assert refused.value.field == f"load.{next(iter(wrong))}"
