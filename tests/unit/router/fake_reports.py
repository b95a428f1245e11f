"""A worker whose report stream and token stream a test fills, and the link through which a router follows it."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from core.lifecycle import ServiceRole
from core.paths import PeerLeft
from core.service import Endpoint
from protos import codec
from router.links.worker_link import WorkerLink
from router.requests.events import WorkerJoined
from runtime.rpc.security import OPEN
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.support.driven_worker import address

M = TypeVar("M", worker_pb2.WorkerReport, worker_pb2.StepTokens)


class Messages(Generic[M]):
    """Stands in for a stream of grpc.aio. Has the messages of `put`, raises the exceptions, and never ends."""

    def __init__(self, *messages: M | BaseException) -> None:
        self._messages: asyncio.Queue[M | BaseException] = asyncio.Queue()
        for message in messages:
            self.put(message)

    def put(self, message: M | BaseException) -> None:
        self._messages.put_nowait(message)

    async def read(self) -> M:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def cancel(self) -> None:
        pass


Reports = Messages[worker_pb2.WorkerReport]


class FakeWorker:
    """Each Watch call takes the next of `streams`; after the last one, it takes `reports`."""

    link: WorkerLink

    def __init__(self) -> None:
        self.posted: asyncio.Queue[Any] = asyncio.Queue()  # to the router's machine
        self.known = True  # to that machine
        self.streams: list[Reports] = []
        self.reports = Reports()
        self.num_watches = 0
        self.intervals_ms: list[int] = []  # of each Watch and PaceReports call
        self.tokens: list[Messages[worker_pb2.StepTokens]] = []
        self.stream_ids: list[int] = []
        self.silent = False  # a token stream has no first message
        self.finish_reason: Any = inference_pb2.FINISH_REASON_STOP  # of each Prefill and Decode call
        self.refusal: BaseException | None = None  # of each Decode call
        self.waits = False  # each Decode call, until it is cancelled
        self.num_cancelled = 0  # Decode calls
        self.decodes: list[worker_pb2.DecodeRequest] = []
        self.told: list[list[str]] = []  # the changes of each UpdatePeers call
        self.later_changes: list[list[PeerLeft]] = []  # the link gets the next of them as an UpdatePeers call ends

    def is_followed(self, *streams: Reports) -> None:
        """From now on, by a router."""
        self.streams += streams
        endpoint = Endpoint("w", "127.0.0.1:1", ServiceRole.DECODE)
        self.link = WorkerLink(endpoint, "router", self.posted.put_nowait, lambda _: self.known, OPEN)
        self.link._worker = self.link._prefill = self.link._decode = self  # type: ignore[assignment]

    def Watch(self, request: worker_pb2.WatchRequest, **__: object) -> Reports:
        self.num_watches += 1
        self.intervals_ms.append(request.min_interval_ms)
        return self.streams.pop(0) if self.streams else self.reports

    def StreamTokens(self, request: worker_pb2.StreamTokensRequest, **_: object) -> Messages[worker_pb2.StepTokens]:
        self.stream_ids.append(request.stream_id)
        tokens = Messages(worker_pb2.StepTokens())
        if self.silent:
            tokens._messages.get_nowait()
        self.tokens.append(tokens)
        return tokens

    async def UpdatePeers(self, request: worker_pb2.UpdatePeersRequest, **_: object) -> worker_pb2.UpdatePeersResponse:
        self.told.append([change.left for change in request.changes])
        if self.later_changes:
            asyncio.get_running_loop().call_soon(self.link.update_peers, self.later_changes.pop(0))
        return worker_pb2.UpdatePeersResponse()

    async def PaceReports(self, request: worker_pb2.PaceReportsRequest, **_: object) -> worker_pb2.PaceReportsResponse:
        self.intervals_ms.append(request.min_interval_ms)
        return worker_pb2.PaceReportsResponse()

    async def Prefill(self, _: worker_pb2.PrefillRequest, **__: object) -> worker_pb2.PrefillResponse:
        return worker_pb2.PrefillResponse(finish_reason=self.finish_reason)

    async def Decode(self, request: worker_pb2.DecodeRequest, **_: object) -> worker_pb2.DecodeFinished:
        assert request.stream_id == self.stream_ids[-1]
        self.decodes.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        return worker_pb2.DecodeFinished(finish_reason=self.finish_reason, num_tokens=3)

    async def event(self) -> Any:
        """The next event for the router's machine."""
        async with asyncio.timeout(5):
            return await self.posted.get()

    async def joins(self) -> None:
        self.reports.put(snapshot("w"))
        assert isinstance(await self.event(), WorkerJoined)


def load(**changed: Any) -> worker_pb2.LoadReport:
    """The load of a serving worker."""
    costs = worker_pb2.StepCost(step_s=0.004, sequence_s=0.0005)
    fields: dict[str, Any] = {"state": worker_pb2.WORKER_STATE_SERVING, "step_cost": costs}
    return worker_pb2.LoadReport(**(fields | changed))


def snapshot(worker_id: str, role: ServiceRole = ServiceRole.DECODE) -> worker_pb2.WorkerReport:
    """The first report of a serving worker."""
    report = worker_pb2.WorkerReport(load=load())
    report.snapshot.worker_id, report.snapshot.role = worker_id, codec.ROLE_TO_WIRE[role]
    report.snapshot.agent.CopyFrom(codec.encode_agent(address(worker_id)))
    return report
