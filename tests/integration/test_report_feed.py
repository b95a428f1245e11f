"""A real report stream: a slow reader is cut off, and the router beside it stays in step with the caches."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from runtime.rpc.grpc_server import open_channel
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from tests.support.deployment import deploy
from tests.support.faults import Stream, fault_config, prompt_of
from tests.support.steps import slow_down
from tests.support.waiting import until
from worker.reports import MAX_REPORTS_BEHIND, ReportFeed

STORMS = 4000  # reports at most until the slow reader is cut off


async def test_a_reader_that_stops_reading_is_cut_off_and_the_router_beside_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deploy(fault_config()) as deployment:
        worker = deployment.decode[0]
        slow_down(worker, 0.01)
        feed, changes = worker._feed, worker._feed._changes
        bystander = await Stream(deployment.inference, prompt_of(1), 600, timeout_s=60.0).reach(3)
        (routers_subscription,) = feed._subscribers
        async with open_channel(deployment.endpoints[id(worker)].address, 1 << 22) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Watch(worker_pb2.WatchRequest(router_id="slow"))
            assert (await call.read()).HasField("snapshot")
            assert len(feed._subscribers) == 2

            def long_changes() -> worker_pb2.WorkerReport:
                report = changes() or worker_pb2.WorkerReport()
                unknown = range(2**60, 2**60 + 3000)  # blocks that the worker never had
                report.block_runs.extend([0] * (1 - len(report.block_runs) % 2))
                report.block_changes.extend(unknown)
                report.block_runs.append(len(unknown))
                return report

            monkeypatch.setattr(feed, "_changes", long_changes)
            longest = await storm(feed, routers_subscription.queue)
            assert longest <= MAX_REPORTS_BEHIND + 1
            assert feed._subscribers == {routers_subscription}, "the router was cut off, too"
            numbers: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError, match="slow read too slowly"):
                await read_to_the_end(call, numbers)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert len(numbers) > MAX_REPORTS_BEHIND
        assert not bystander.ended
        await bystander.right()
        assert bystander.finished.attempts == 1
        await deployment.settle()
        await until(lambda: deployment.caches_are_known, "the router is in step")


async def read_to_the_end(call: Any, numbers: list[int]) -> None:
    while True:
        numbers.append((await call.read()).sequence_number)


async def storm(feed: ReportFeed, read: asyncio.Queue[Any]) -> int:
    """Publish until one of two subscribers is cut off, each report after the reader of `read` has those before it.
    The length of the longest queue on the way."""
    longest = 0
    for _ in range(STORMS):
        feed.publish()
        longest = max([longest, *(subscriber.queue.qsize() for subscriber in feed._subscribers)])
        if len(feed._subscribers) < 2:
            return longest
        await asyncio.sleep(0.001)
        await until(read.empty, "the router has read the report")
    raise AssertionError("the slow reader is not cut off")
