"""A worker's report feed: each router gets a snapshot, then every change once, numbered. A router that reads too slowly
is cut off, and the others notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from core.config import WorkerConfig
from protos import worker_pb2
from worker.reports import MAX_REPORTS_BEHIND, ReportFeed


class Refused(Exception):
    pass


class Context:
    """Of a Watch call. A write waits while `reads` is clear."""

    def __init__(self) -> None:
        self.written: list[worker_pb2.WorkerReport] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, report: worker_pb2.WorkerReport) -> None:
        await self.reads.wait()
        self.written.append(report)

    async def abort(self, code: grpc.StatusCode, details: str, _: object) -> None:
        raise Refused(code, details)

    @property
    def numbers(self) -> list[int]:
        return [report.sequence_number for report in self.written]

    @property
    def stored(self) -> list[int]:
        """Sequence hashes, those of the snapshot first."""
        known = list(self.written[0].snapshot.cached_blocks)
        return known + [event.stored for report in self.written[1:] for event in report.block_events]


class Worker:
    """A cache that only grows; `feed` reports what is new in it."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self._num_told = 0
        no_holders = worker_pb2.DescribeLedgerResponse
        self.feed = ReportFeed(WorkerConfig(), self._snapshot, self._changes, no_holders, lambda _news: None)
        self._calls: set[asyncio.Task[None]] = set()

    def _snapshot(self) -> worker_pb2.WorkerReport:
        return worker_pb2.WorkerReport(snapshot=worker_pb2.WorkerSnapshot(worker_id="w", cached_blocks=self.cached))

    def _changes(self) -> worker_pb2.WorkerReport:
        new, self._num_told = self.cached[self._num_told :], len(self.cached)
        return worker_pb2.WorkerReport(block_events=[worker_pb2.BlockEvent(stored=stored) for stored in new])

    async def watch(self, router_id: str, context: Context) -> asyncio.Task[None]:
        call: Any = self.feed.Watch(worker_pb2.WatchRequest(router_id=router_id), context)  # type: ignore[arg-type]
        watching = asyncio.create_task(call)
        self._calls.add(watching)
        await asyncio.sleep(0)
        return watching

    async def store(self, sequence_hash: int, publish: bool = True) -> None:
        self.cached.append(sequence_hash)
        if publish:
            self.feed._publish()
            for _ in range(3):
                await asyncio.sleep(0)

    async def end(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


async def test_two_routers_each_get_every_change_once_under_numbers_of_their_own() -> None:
    worker, early, late = Worker(), Context(), Context()
    await worker.store(1)
    await worker.watch("early", early)
    await worker.store(2)
    await worker.store(3, publish=False)  # the next subscription must not take this change away from the first router
    await worker.watch("late", late)
    await worker.store(4)
    assert early.stored == [1, 2, 3, 4]
    assert late.stored == [1, 2, 3, 4]
    assert list(late.written[0].snapshot.cached_blocks) == [1, 2, 3]
    assert early.numbers == [0, 1, 2, 3]
    assert late.numbers == [0, 1]
    await worker.end()


async def test_a_router_that_is_too_far_behind_is_cut_off_and_starts_again_with_a_snapshot() -> None:
    worker, slow, bystander = Worker(), Context(), Context()
    await worker.watch("bystander", bystander)
    slow_call = await worker.watch("slow", slow)
    slow.reads.clear()
    last = MAX_REPORTS_BEHIND + 2  # one report waits in `write`; the last one finds the queue full
    for number in range(1, last):
        await worker.store(number)
    assert len(worker.feed._subscribers) == 2
    await worker.store(last)
    (queue,) = worker.feed._subscribers
    assert queue.empty(), "the bystander is in step"
    for number in range(last + 1, last + 500):
        await worker.store(number)
    slow.reads.set()
    with pytest.raises(Refused, match="slow read too slowly"):
        await slow_call
    assert slow.numbers == list(range(last)), "no report is missing before the end"
    assert slow.stored == list(range(1, last))
    assert bystander.numbers == list(range(len(bystander.numbers)))
    assert bystander.stored == list(range(1, last + 500))
    again = Context()
    await worker.watch("slow", again)
    await worker.store(9999)
    assert again.numbers == [0, 1]
    assert again.stored == bystander.stored == worker.cached
    await worker.end()


async def test_a_router_that_goes_away_is_forgotten() -> None:
    worker, context = Worker(), Context()
    watching = await worker.watch("r", context)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not worker.feed._subscribers
