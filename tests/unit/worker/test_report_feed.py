"""A worker's report feed: each router gets a snapshot, then every change once, numbered. A router that reads too slowly
is cut off, and the others notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from core.config import WorkerConfig
from tandem_client.stubs import worker_pb2
from tests.support.waiting import until
from worker.reports import MAX_REPORTS_BEHIND, ReportFeed

CONFIG = WorkerConfig()


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
        return known + [stored for report in self.written[1:] for stored in report.block_changes]


class Worker:
    """A cache that only grows; `feed` reports what is new in it."""

    def __init__(self, config: WorkerConfig = CONFIG) -> None:
        self.cached: list[int] = []
        self._num_told = 0
        no_holders = worker_pb2.DescribeLedgerResponse
        self.feed = ReportFeed(config, self._snapshot, self._changes, no_holders, lambda _news: None)
        self._calls: set[asyncio.Task[None]] = set()

    def _snapshot(self) -> worker_pb2.WorkerReport:
        return worker_pb2.WorkerReport(snapshot=worker_pb2.WorkerSnapshot(worker_id="w", cached_blocks=self.cached))

    def _changes(self) -> worker_pb2.WorkerReport | None:
        new, self._num_told = self.cached[self._num_told :], len(self.cached)
        return worker_pb2.WorkerReport(block_changes=new, block_runs=[len(new)]) if new else None

    async def watch(self, router_id: str, context: Context, min_interval_ms: int = 0) -> asyncio.Task[None]:
        request = worker_pb2.WatchRequest(router_id=router_id, min_interval_ms=min_interval_ms)
        call: Any = self.feed.Watch(request, context)  # type: ignore[arg-type]
        watching = asyncio.create_task(call)
        self._calls.add(watching)
        await asyncio.sleep(0)
        return watching

    def run(self) -> None:
        self._calls.add(asyncio.create_task(self.feed.run()))

    async def store(self, sequence_hash: int, publish: bool = True) -> None:
        self.cached.append(sequence_hash)
        if publish:
            self.feed.publish()
            for _ in range(3):
                await asyncio.sleep(0)

    async def end(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


async def test_two_routers_each_get_every_change_once_under_the_same_numbers() -> None:
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
    assert early.numbers == [1, 2, 3, 4]
    assert late.numbers == [3, 4], "a snapshot repeats the number of the report before it"
    assert early.written[-1] is late.written[-1], "a report is built once for all routers"
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
    (subscriber,) = worker.feed._subscribers
    assert subscriber.queue.empty(), "the bystander is in step"
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
    assert again.numbers == [last + 499, last + 500]
    assert again.stored == bystander.stored == worker.cached
    await worker.end()


async def test_an_idle_worker_sends_its_next_number_and_nothing_else_from_a_shorter_interval_on() -> None:
    worker, context = Worker(WorkerConfig(report_interval_s=0.001, idle_report_interval_s=1000.0)), Context()
    await worker.watch("r", context)
    worker.run()
    await asyncio.sleep(0.01)
    worker.feed.set_config(WorkerConfig(report_interval_s=0.001, idle_report_interval_s=0.01))
    await until(lambda: len(context.written) >= 4, "signs of life", 5.0)
    for number, report in enumerate(context.written[1:], start=1):
        assert report == worker_pb2.WorkerReport(sequence_number=number)
    await worker.end()


async def test_an_event_that_changes_nothing_sends_no_report_before_the_next_sign_of_life() -> None:
    worker, context = Worker(WorkerConfig(report_interval_s=0.001, idle_report_interval_s=1000.0)), Context()
    await worker.watch("r", context)
    worker.run()
    for _ in range(5):
        worker.feed.mark_changed()
        await asyncio.sleep(0.003)
    assert context.numbers == [0]
    worker.cached.append(7)
    worker.feed.mark_changed()
    await until(lambda: len(context.written) > 1, "a report", 5.0)
    assert context.stored == [7]
    await worker.end()


async def test_a_router_that_goes_away_is_forgotten() -> None:
    worker, context = Worker(), Context()
    watching = await worker.watch("r", context)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not worker.feed._subscribers


async def test_a_closed_feed_ends_its_streams_and_refuses_new_ones() -> None:
    """Else the router would take a failed worker for a new one."""
    worker, context = Worker(), Context()
    watching = await worker.watch("r", context)
    await worker.store(1)
    worker.feed.close()
    with pytest.raises(Refused, match="UNAVAILABLE"):
        await watching
    with pytest.raises(Refused, match="UNAVAILABLE"):
        await (await worker.watch("r", context))
    assert context.numbers == [0, 1]


async def test_the_slowest_router_that_watches_sets_the_pace_of_the_reports() -> None:
    worker, nobody = Worker(), Context()

    async def pace(router_id: str, milliseconds: int) -> float:
        request = worker_pb2.PaceReportsRequest(router_id=router_id, min_interval_ms=milliseconds)
        await worker.feed.PaceReports(request, nobody)  # type: ignore[arg-type]
        return worker.feed.interval_s

    assert worker.feed.interval_s == CONFIG.report_interval_s
    slow = await worker.watch("slow", Context(), 200)
    await worker.watch("fast", Context(), 1)
    assert worker.feed.interval_s == 0.2
    assert await pace("fast", 300) == 0.3
    assert await pace("slow", 100_000) == CONFIG.idle_report_interval_s, "a worker always shows that it is alive"
    assert await pace("a stranger", 900) == CONFIG.idle_report_interval_s
    slow.cancel()
    await asyncio.sleep(0)
    assert worker.feed.interval_s == 0.3
    assert await pace("fast", 0) == CONFIG.report_interval_s
    await worker.end()
