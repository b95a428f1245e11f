"""The reports of a worker to its routers: a snapshot, then the changes of load, cache and paths, at a bounded rate.

A report has only what changed, and all routers get the same report, built once, as often as the slowest of them can
read: a router of many workers asks each of them for fewer. Without changes, the worker sends its
next number every `idle_report_interval_s`: routers see that the worker is alive. A report gets its number before it
enters the queue of any router, so a router notices the loss of a report as a gap.

If a router reads too slowly, the worker ends its stream rather than skip a report. The router subscribes again and gets
a new snapshot. So the view of each router is either up to date or known to be stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from core.config import WorkerConfig
from core.errors import WorkerUnavailable
from core.paths import PeerJoined, PeerLeft
from protos import codec
from runtime.rpc.grpc_server import aborts
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.prefixes import PrefixRequested

MAX_REPORTS_BEHIND = 64  # reports that wait for one router; beyond: the stream ends; the router subscribes again
MAX_HOLDERS = 1024  # in one response of DescribeLedger
CHANGES_IN_A_TURN = 64  # of peers, about 10 us each: the loop serves other calls in between


@dataclass(slots=True, eq=False)
class _Subscriber:
    router_id: str
    least_interval_s: float  # that it wants between two reports
    queue: asyncio.Queue[worker_pb2.WorkerReport | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_REPORTS_BEHIND + 1)
    )


class ReportFeed(worker_pb2_grpc.WorkerServicer):
    """The `tandem.v1.Worker` service.

    `snapshot()` returns the worker, its whole cache, its load and its paths. `changes()` returns what has changed since
    the last call; None if nothing has. `holders()` lists the holders of blocks. `ask(event)` takes the news of peers
    from a router. The feed calls them on the loop's thread.
    """

    def __init__(
        self,
        config: WorkerConfig,
        snapshot: Callable[[], worker_pb2.WorkerReport],
        changes: Callable[[], worker_pb2.WorkerReport | None],
        holders: Callable[[], worker_pb2.DescribeLedgerResponse],
        ask: Callable[[PeerJoined | PeerLeft | PrefixRequested], None],
    ) -> None:
        self._config = config
        self._snapshot = snapshot
        self._changes = changes
        self._holders = holders
        self._ask = ask
        self._subscribers: set[_Subscriber] = set()
        self._changed = asyncio.Event()
        self._number = 0  # of the last report
        self._closed = False

    def set_config(self, config: WorkerConfig) -> None:
        """Take other intervals. The next sign of life comes by the new one."""
        self._config = config
        self._changed.set()

    def mark_changed(self) -> None:
        """Look for changes, and report them, within `interval_s`."""
        self._changed.set()

    async def run(self) -> None:
        """Send reports until cancelled."""
        loop = asyncio.get_running_loop()
        reported_at = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(reported_at + self._config.idle_report_interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            if self.publish(unchanged=loop.time() >= reported_at + self._config.idle_report_interval_s):
                reported_at = loop.time()
            await asyncio.sleep(self.interval_s)  # the rate limit

    @property
    def interval_s(self) -> float:
        """Between two reports, at least."""
        wanted = max((subscriber.least_interval_s for subscriber in self._subscribers), default=0.0)
        return max(self._config.report_interval_s, min(wanted, self._config.idle_report_interval_s))

    def publish(self, *, unchanged: bool = False) -> bool:
        """Queue the changes for every router; without changes, only if `unchanged`. Returns True if there is a report.

        Ends the stream of a router that is too far behind.
        """
        report = self._changes()
        if report is None:
            if not unchanged:
                return False
            report = worker_pb2.WorkerReport()
        self._number += 1
        report.sequence_number = self._number
        for subscriber in list(self._subscribers):
            if subscriber.queue.qsize() >= MAX_REPORTS_BEHIND:
                self._cut_off(subscriber)
            else:
                subscriber.queue.put_nowait(report)
        return True

    def _cut_off(self, subscriber: _Subscriber) -> None:
        self._subscribers.discard(subscriber)
        subscriber.queue.put_nowait(None)

    def end_streams(self) -> None:
        """The routers subscribe again, and get a snapshot."""
        for subscriber in list(self._subscribers):
            self._cut_off(subscriber)

    def close(self) -> None:
        """End every stream and refuse new ones, so that no router takes a stopping worker for a new one."""
        self._closed = True
        self.end_streams()

    @aborts
    async def Watch(self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._closed:
            raise WorkerUnavailable("this worker is stopping or has failed")
        # The snapshot contains all changes so far, and `changes()` returns each only once: publish them first.
        self.publish()
        first = self._snapshot()
        first.sequence_number = self._number
        subscriber = _Subscriber(request.router_id, request.min_interval_ms / 1e3)
        self._subscribers.add(subscriber)
        try:
            await context.write(first)
            while (report := await subscriber.queue.get()) is not None:
                await context.write(report)
        finally:
            self._subscribers.discard(subscriber)
        raise WorkerUnavailable(f"{request.router_id} read too slowly, or this worker stops or changes its role")

    async def PaceReports(
        self, request: worker_pb2.PaceReportsRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PaceReportsResponse:
        for subscriber in self._subscribers:
            if subscriber.router_id == request.router_id:
                subscriber.least_interval_s = request.min_interval_ms / 1e3
        return worker_pb2.PaceReportsResponse()

    async def DescribeLedger(
        self, request: worker_pb2.DescribeLedgerRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DescribeLedgerResponse:
        response = self._holders()
        limit = min(request.max_holders or MAX_HOLDERS, MAX_HOLDERS)
        response.num_left_out = max(0, len(response.holders) - limit)
        del response.holders[limit:]
        return response

    @aborts
    async def OfferPrefix(
        self, request: worker_pb2.OfferPrefixRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.OfferPrefixResponse:
        transfer_id, reader = codec.decode_transfer_id(request.transfer_id), codec.decode_agent(request.reader)
        token_ids, limit_s = codec.decode_token_ids(request.packed_token_ids), codec.decode_limit(request.limit_ms)
        self._ask(PrefixRequested(transfer_id, reader, token_ids, request.cache_salt, limit_s))
        return worker_pb2.OfferPrefixResponse()

    @aborts
    async def UpdatePeers(
        self, request: worker_pb2.UpdatePeersRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.UpdatePeersResponse:
        for number, change in enumerate(request.changes, start=1):
            self._ask(codec.decode_change(change))
            if number % CHANGES_IN_A_TURN == 0:
                await asyncio.sleep(0)
        return worker_pb2.UpdatePeersResponse()
