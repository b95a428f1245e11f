"""The router's connection to one worker: a channel, the report stream, the token stream, and the open calls.

The report stream shows that the worker is alive. When it breaks, the link subscribes again at once. If that fails, the
link reports the worker lost and keeps trying until the supervisor removes the worker. The link subscribes to a decode
worker only while a token stream is open. So the machine dispatches nothing to a worker without a token stream: its loss
makes the worker suspect until the next snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import assert_never

import grpc
import grpc.aio

from core.block_hash import pack_token_ids
from core.errors import (
    InvalidRequest,
    TandemError,
    TokenStreamEnded,
    TransferFailed,
    Unauthenticated,
    WorkerUnavailable,
)
from core.lifecycle import FinishReason, ServiceRole
from core.paths import PeerJoined, PeerLeft
from core.scheduling.worker_load import CallId, WorkerChanges, WorkerLoad
from core.service import Endpoint
from protos import codec, report_codec
from protos.handoff_codec import encode_transfer_id
from router.links.token_stream import TokenStreamReader
from router.requests import events
from router.requests.events import RouterEvent, WorkerCall
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, cancel_and_wait, error_from, open_channel
from runtime.rpc.security import Credentials
from runtime.tracing.span_names import SpanName
from tandem_client.stubs import worker_pb2, worker_pb2_grpc

# Limit: the first report, or message of a token stream; beyond: the worker is lost; the router connects again
CONNECT_TIMEOUT_S = 2.0
# A busy router reads late. With a window of some hundred tokens, the worker soon waits, and joins its next steps into
# one message. With gRPC's own window, dozens of steps would wait in the connection, each as a message of its own.
WINDOW_BYTES = 4096
RETRY_S = (0.0, 0.2, 0.5, 1.0)  # pauses before an attempt to subscribe; the last one repeats

SPAN_NAMES = frozenset(name.value for name in SpanName)

logger = logging.getLogger(__name__)


class WorkerLink:
    """`post` sends an event to the router's machine; `is_known` tells whether the machine has the worker."""

    def __init__(
        self,
        endpoint: Endpoint,
        router_id: str,
        post: Callable[[RouterEvent], None],
        is_known: Callable[[str], bool],
        credentials: Credentials,
        report_interval_ms: int = 0,
    ) -> None:
        """`report_interval_ms`: as of `pace_reports`."""
        self.endpoint = endpoint
        self.load: WorkerLoad | None = None  # as last reported
        self.reported_at = 0.0
        self._router_id = router_id
        self._post = post
        self._is_known = is_known
        self._credentials = credentials
        self._channel = open_channel(endpoint.address, MAX_GRPC_MESSAGE_BYTES, credentials, WINDOW_BYTES)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._prefill = worker_pb2_grpc.PrefillWorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._decode = worker_pb2_grpc.DecodeWorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._calls: dict[str, asyncio.Task[None]] = {}  # by dispatch id
        self._short_calls: set[asyncio.Task[None]] = set()  # that end by themselves soon
        self._peer_changes: list[PeerJoined | PeerLeft] = []  # not sent yet
        self._updating_peers: asyncio.Task[None] | None = None
        self._report_interval_ms = report_interval_ms  # the least
        self._told_interval_ms: int | None = None  # to a worker whose reports arrive
        self._failures = 0  # of the report stream, since the last report
        self._join_error = ""  # as logged last
        self._time_limit: asyncio.Timeout | None = None  # of the Watch call
        self._tokens = TokenStreamReader(endpoint.service_id, router_id, post, self._on_stream_broken)
        self._watching = asyncio.create_task(self._watch(), name=f"watch-{endpoint.service_id}")

    def end_watch(self) -> None:
        """Post no further event of the report stream, not even for a report that has arrived already."""
        self._watching.cancel()

    async def until_ended(self, timeout_s: float) -> None:
        """Wait until the worker has ended its calls and its token stream, as one that stops does."""
        open_ones = [*self._calls.values(), *self._tokens.reading]
        if open_ones:
            await asyncio.wait(open_ones, timeout=timeout_s)

    async def close(self) -> None:
        updating_peers = [] if self._updating_peers is None else [self._updating_peers]
        await cancel_and_wait([self._watching, *updating_peers, *self._calls.values(), *self._short_calls])
        await self._tokens.close()
        await self._channel.close(None)

    # ---- reports

    async def _watch(self) -> None:
        """Follow the reports until cancelled. After a fault, report the worker lost and subscribe again."""
        while True:
            await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S) as self._time_limit:
                    if self.endpoint.role is ServiceRole.DECODE:
                        await self._tokens.open(self._decode, self._credentials.metadata)
                    await self._follow_reports(self._time_limit)
                self._failures = 0  # a report is missing, or the machine lost the worker: get a fresh snapshot
            except (grpc.aio.AioRpcError, TimeoutError, WorkerUnavailable) as error:
                self._failures += 1
                cause = (
                    error_from(error)
                    if isinstance(error, grpc.RpcError)
                    else str(error) or "the worker does not answer"
                )
                if isinstance(cause, Unauthenticated) and self._failures == 1:
                    logger.error("worker %s and this router have different cluster tokens", self.endpoint.service_id)
                if self._failures >= 2:
                    self._report_loss(str(cause))
            except Exception as error:  # a bug, too: the next snapshot may avoid it
                if str(error) != self._join_error:
                    trace = None if isinstance(error, TandemError) else error
                    logger.error("worker %s cannot join: %s", self.endpoint.service_id, error, exc_info=trace)
                self._join_error = str(error)
                self._failures = len(RETRY_S)
                self._report_loss(str(error))
            finally:
                self._time_limit = None

    async def _follow_reports(self, time_limit: asyncio.Timeout) -> None:
        """Post reports in order. Returns when the link has to subscribe again.

        Raises `InvalidRequest` or `LayoutMismatch` if the worker cannot join, and `WorkerUnavailable` if it serves in
        another role.
        """
        loop = asyncio.get_running_loop()
        interval_ms = self._report_interval_ms
        request = worker_pb2.WatchRequest(router_id=self._router_id, min_interval_ms=interval_ms)
        reports = self._worker.Watch(request, metadata=self._credentials.metadata)
        expected: int | None = None  # number of the next report
        try:
            while (report := await reports.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                time_limit.reschedule(None)  # from now on the machine detects a silent worker
                if not self._has_token_stream:
                    return
                event: RouterEvent
                if expected is None and report.HasField("snapshot"):
                    event = self._joined(report)
                    self._told_interval_ms = interval_ms
                    self.pace_reports(self._report_interval_ms)
                elif report.sequence_number == expected and self._is_known(self.endpoint.service_id):
                    event = events.WorkerReported(self.endpoint.service_id, self._changes(report))
                else:
                    return
                self.reported_at = loop.time()
                self._post(event)
                self._failures = 0
                expected = report.sequence_number + 1
        finally:
            self._told_interval_ms = None
            reports.cancel()

    def pace_reports(self, interval_ms: int) -> None:
        """The worker shall report no more often than this."""
        self._report_interval_ms = interval_ms
        if self._told_interval_ms not in (None, interval_ms):
            self._told_interval_ms = interval_ms
            self._call_shortly(self._call_pace_reports(interval_ms), "pace of reports")

    @property
    def _has_token_stream(self) -> bool:
        return self.endpoint.role is not ServiceRole.DECODE or self._tokens.stream_id != 0

    def _on_stream_broken(self) -> None:
        """End the Watch call: the worker joins again after the next token stream is open."""
        if self._time_limit is not None and not self._time_limit.expired():  # else `_watch` pauses
            self._time_limit.reschedule(asyncio.get_running_loop().time())

    def _changes(self, report: worker_pb2.WorkerReport) -> WorkerChanges:
        changes = report_codec.decode_changes(report)
        self.load = changes.load or self.load
        return changes

    def _joined(self, report: worker_pb2.WorkerReport) -> events.WorkerJoined:
        snapshot, changes = report.snapshot, self._changes(report)
        if snapshot.worker_id != self.endpoint.service_id:  # another worker listens on this port now
            raise InvalidRequest("worker_id", f"must be {self.endpoint.service_id!r}, is {snapshot.worker_id!r}")
        if changes.load is None:
            raise InvalidRequest("load", "must be set beside a snapshot")
        if codec.decode_role(snapshot.role) is not self.endpoint.role:  # the supervisor will say so
            raise WorkerUnavailable(f"the worker serves as {codec.decode_role(snapshot.role).value} worker now")
        return events.WorkerJoined(
            worker_id=self.endpoint.service_id,
            role=self.endpoint.role,
            agent=codec.decode_agent(snapshot.agent),
            cached_blocks=tuple(snapshot.cached_blocks),
            load=changes.load,
            paths=changes.paths,
        )

    def _report_loss(self, detail: str) -> None:
        if self._is_known(self.endpoint.service_id):
            logger.warning("worker %s is lost: %s", self.endpoint.service_id, detail)
            self._post(events.WorkerLost(self.endpoint.service_id, detail))

    # ---- calls

    async def describe_ledger(self, max_holders: int, timeout_s: float) -> worker_pb2.DescribeLedgerResponse:
        """Raises `TandemError`."""
        request = worker_pb2.DescribeLedgerRequest(max_holders=max_holders)
        try:
            answer: worker_pb2.DescribeLedgerResponse = await self._worker.DescribeLedger(
                request, timeout=timeout_s, metadata=self._credentials.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from error
        return answer

    def update_peers(self, changes: Iterable[PeerJoined | PeerLeft]) -> None:
        """Send the changes in the background: one call at a time, in order."""
        self._peer_changes += changes
        if self._updating_peers is None:
            self._updating_peers = asyncio.create_task(self._call_update_peers())

    def perform(self, action: WorkerCall) -> None:
        """Make the call in the background. `cancel` ends Prefill and Decode calls."""
        match action:
            case events.StartPrefill():
                self._start(action.dispatch_id, self._call_prefill(action))
                return
            case events.StartDecode():
                self._start(action.dispatch_id, self._call_decode(action))
                return
            case events.HandOver():
                call = self._call_hand_over(action)
            case events.StartMove() | events.ResumeSequence():
                call = self._call_move(action)
            case events.OfferPrefix():
                call = self._call_offer_prefix(action)
            case events.WithdrawOffer():
                call = self._call_withdraw(action)
            case _:
                assert_never(action)
        self._call_shortly(call, f"{action.dispatch_id} {type(action).__name__}")

    def cancel(self, dispatch_id: str) -> None:
        call = self._calls.get(dispatch_id)
        if call is not None:
            call.cancel()

    def _start(self, dispatch_id: str, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call, name=dispatch_id)
        self._calls[dispatch_id] = task
        task.add_done_callback(lambda _: self._calls.pop(dispatch_id, None))

    def _call_shortly(self, call: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(call, name=name)
        self._short_calls.add(task)
        task.add_done_callback(self._short_calls.discard)

    async def _call_pace_reports(self, interval_ms: int) -> None:
        request = worker_pb2.PaceReportsRequest(router_id=self._router_id, min_interval_ms=interval_ms)
        try:
            await self._worker.PaceReports(request, timeout=CONNECT_TIMEOUT_S, metadata=self._credentials.metadata)
        except grpc.aio.AioRpcError as error:  # the next Watch call says it again
            logger.info("cannot pace the reports of worker %s: %s", self.endpoint.service_id, error_from(error))

    async def _call_update_peers(self) -> None:
        while self._peer_changes:
            changes, self._peer_changes = self._peer_changes, []
            try:
                request = worker_pb2.UpdatePeersRequest(changes=map(codec.encode_change, changes))
                await self._worker.UpdatePeers(request, timeout=CONNECT_TIMEOUT_S, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                # The worker and its peers then connect at their first hand-off.
                logger.info("cannot send worker %s its peers: %s", self.endpoint.service_id, error_from(error))
            except Exception:
                logger.exception("cannot send worker %s its peers", self.endpoint.service_id)
        self._updating_peers = None  # here and not in a done callback, before which more changes may arrive

    async def _call_prefill(self, action: events.StartPrefill) -> None:
        metadata = self._credentials.metadata
        result: events.PrefillResult | TandemError
        try:
            request = worker_pb2.PrefillRequest(
                sequence=codec.encode_sequence(action.request, CallId(self._router_id, action.call)),
                transfer_id=encode_transfer_id(action.transfer_id),
                reader=codec.encode_agent(action.reader),
                prefix=codec.encode_prefix(action.prefix),
            )
            answer = await self._prefill.Prefill(request, timeout=action.timeout_s, metadata=metadata)
            result = _decode_prefill(answer)
        except Exception as error:  # noqa: BLE001 - the request waits for an event after any failure
            result = _failure(error)
        self._post(events.PrefillReturned(action.dispatch_id, result))

    async def _call_hand_over(self, action: events.HandOver) -> None:
        """A failure is the answer of the decode call, which waits in vain, or runs for nobody: it is cancelled."""
        request = worker_pb2.HandOverRequest(transfer_id=encode_transfer_id(action.transfer_id), handoff=action.handoff)
        timeout_s = min(action.timeout_s, CONNECT_TIMEOUT_S)
        try:
            await self._decode.HandOver(request, timeout=timeout_s, metadata=self._credentials.metadata)
        except Exception as error:  # noqa: BLE001 - the request waits for an event after any failure
            failed = TransferFailed(f"the decode worker did not take the hand-off: {_failure(error)}")
            self.cancel(action.dispatch_id)
            self._post(events.DecodeReturned(action.dispatch_id, failed))

    async def _call_withdraw(self, action: events.WithdrawOffer) -> None:
        request = worker_pb2.WithdrawRequest(transfer_id=encode_transfer_id(action.transfer_id))
        try:
            await self._prefill.Withdraw(request, timeout=CONNECT_TIMEOUT_S, metadata=self._credentials.metadata)
        except grpc.aio.AioRpcError as error:  # the blocks are free at the end of their lease
            logger.debug("worker %s keeps %s: %s", self.endpoint.service_id, action.dispatch_id, error_from(error))

    async def _call_offer_prefix(self, action: events.OfferPrefix) -> None:
        request = worker_pb2.OfferPrefixRequest(
            transfer_id=encode_transfer_id(action.transfer_id),
            reader=codec.encode_agent(action.reader),
            packed_token_ids=pack_token_ids(action.token_ids),
            cache_salt=action.cache_salt,
            limit_ms=action.limit_s * 1e3,
        )
        try:
            await self._worker.OfferPrefix(request, timeout=action.limit_s, metadata=self._credentials.metadata)
        except Exception as error:  # noqa: BLE001 - the reader computes the prefix after any failure
            failure, worker_id = _failure(error), self.endpoint.service_id
            logger.info("worker %s gives no prefix for %s: %s", worker_id, action.dispatch_id, failure)
            self._post(events.PrefixRefused(action.dispatch_id, worker_id, failure))

    async def _call_move(self, action: events.StartMove | events.ResumeSequence) -> None:
        request = worker_pb2.MoveRequest(transfer_id=encode_transfer_id(action.transfer_id))
        match action:
            case events.StartMove(source_id=source_id, reader=reader, num_tokens=num_tokens):
                request.request_id = source_id
                request.reader.agent.CopyFrom(codec.encode_agent(reader))
                request.reader.num_tokens = num_tokens
            case events.ResumeSequence(dispatch_id):
                request.request_id = dispatch_id
                request.resume.SetInParent()
        try:
            await self._decode.Move(request, timeout=CONNECT_TIMEOUT_S, metadata=self._credentials.metadata)
        except Exception as error:  # noqa: BLE001 - the request waits for an event after any failure
            failure = _failure(error)
            logger.info(
                "worker %s does not take the move of %s: %s", self.endpoint.service_id, request.request_id, failure
            )
            if isinstance(action, events.StartMove):  # else the paused sequence ends within a lease
                self._post(events.MoveRefused(action.dispatch_id, failure))

    async def _call_decode(self, action: events.StartDecode) -> None:
        metadata = self._credentials.metadata
        result: events.DecodeResult | TandemError
        stream_id = self._tokens.stream_id
        try:
            if not stream_id:
                raise TokenStreamEnded("the token stream of the worker is closed")
            sequence = codec.encode_sequence(action.request, CallId(self._router_id, action.call))
            prefix = codec.encode_prefix(action.prefix)
            request = worker_pb2.DecodeRequest(
                sequence=sequence, stream_id=stream_id, is_move=action.is_move, prefix=prefix
            )
            if action.source is not None:
                transfer_id, agent = action.source
                request.transfer_id = encode_transfer_id(transfer_id)
                request.source.CopyFrom(codec.encode_agent(agent))
            result = _decode_finished(await self._decode.Decode(request, timeout=action.timeout_s, metadata=metadata))
        except Exception as error:  # noqa: BLE001 - the request waits for an event after any failure
            result = _failure(error)
            if isinstance(result, TokenStreamEnded):
                self._tokens.lose(stream_id, str(result))
        self._post(events.DecodeReturned(action.dispatch_id, result))


def _failure(error: Exception) -> TandemError:
    """The typed error for the exception of a failed call."""
    if isinstance(error, grpc.RpcError):
        return error_from(error)
    if isinstance(error, TokenStreamEnded):
        return error
    if isinstance(error, InvalidRequest):  # the worker may run another version; another worker may not
        return WorkerUnavailable(f"the worker's answer cannot be read: {error}")
    logger.error("a call to a worker failed in the router", exc_info=error)
    return TandemError(f"a call to a worker failed in the router: {type(error).__name__}")


def _decode_prefill(wire: worker_pb2.PrefillResponse) -> events.PrefillResult:
    index, token = codec.decode_token(wire.first_token)
    return events.PrefillResult(
        index=index,
        token=token,
        finish_reason=codec.decode_finish_reason(wire.finish_reason),
        cached_tokens=wire.cached_tokens,
        queue_s=wire.queue_ms / 1e3,
        prefill_s=wire.prefill_ms / 1e3,
        stages=_decode_stages(wire.stages),
        kv_block_seconds=wire.kv_block_seconds,
        handoff=wire.handoff,
        read_bytes=wire.read_bytes,
        read_tokens=wire.read_tokens if wire.HasField("read_tokens") else None,
    )


def _decode_finished(wire: worker_pb2.DecodeFinished) -> events.DecodeResult | TandemError:
    reason = FinishReason.HANDOFF if wire.has_moved else codec.decode_finish_reason(wire.finish_reason)
    if reason is None:
        return TandemError("the decode worker finished without a finish_reason")
    if not wire.num_tokens:
        return TandemError("the decode worker finished without a token")
    return events.DecodeResult(
        finish_reason=reason,
        num_tokens=wire.num_tokens,
        cached_tokens=wire.cached_tokens,
        queue_s=wire.queue_ms / 1e3,
        prefill_s=wire.prefill_ms / 1e3,
        transfer_s=wire.transfer_ms / 1e3,
        transfer_exposed_s=wire.transfer_exposed_ms / 1e3,
        transferred_bytes=wire.transferred_bytes,
        stages=_decode_stages(wire.stages),
        kv_block_seconds=wire.kv_block_seconds,
        num_moved_blocks=wire.num_moved_blocks,
        num_skipped_blocks=wire.num_skipped_blocks,
        drafted_tokens=wire.drafted_tokens,
        accepted_drafts=wire.accepted_drafts,
        recomputed_tokens=wire.recomputed_tokens,
        read_bytes=wire.read_bytes,
        read_tokens=wire.read_tokens if wire.HasField("read_tokens") else None,
    )


def _decode_stages(stages: Iterable[worker_pb2.StageSpan]) -> tuple[events.WorkerStage, ...]:
    """The stages that this version knows."""
    return tuple(
        events.WorkerStage(stage.name, stage.start_ms / 1e3, stage.duration_ms / 1e3, dict(stage.attributes))
        for stage in stages
        if stage.name in SPAN_NAMES
    )
