"""`tandem.v1.DecodeWorker`: turns each Decode call into events for the machine, and streams the tokens to the routers.

    router --StreamTokens(stream_id)--> TokenStreamWriter, one for each router --StepTokens, by the step--> router
    router --Decode(stream_id, call)--> machine --EmitTokens--> the TokenStreamWriter of the call
                                                --DecodeDone, DecodeFailed--> end of the Decode call

A Decode call lives no longer than its token stream. When a stream ends, its calls end with UNAVAILABLE, and the router
retries them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc.aio

from core.errors import InvalidRequest, TandemError, TokenStreamEnded
from core.lifecycle import FinishReason, MoveReason, Stage
from decode_worker.events import (
    AskToMove,
    DecodeAction,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeEvent,
    DecodeFailed,
    EmitTokens,
    HandedOver,
    HandoffArrived,
    MoveArrived,
    ResumeArrived,
)
from decode_worker.token_stream import TokenStreamWriter
from kv_transfer.protocol.events import PullStats
from protos import codec
from runtime.driver import Driver
from runtime.rpc.grpc_server import aborts, remaining_s
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.call_record import stage_spans
from worker.request_check import RequestCheck

SPAN_OF_STAGE = {
    Stage.QUEUE: SpanName.DECODE_QUEUE,
    Stage.PREFILL: SpanName.DECODE_PREFILL,
    Stage.TRANSFER: SpanName.DECODE_TRANSFER,
    Stage.DECODE: SpanName.DECODE_COMPUTE,
    Stage.MOVE: SpanName.DECODE_MOVE,
}

MAX_HANDOFF_BYTES = 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class _DecodeCall:
    number: int  # SequenceRequest.call
    stream: TokenStreamWriter
    end: asyncio.Future[DecodeDone | TandemError]
    num_tokens: int = 0  # put on the stream
    ended_by_machine: bool = False


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    full_name = "tandem.v1.DecodeWorker"
    register = staticmethod(worker_pb2_grpc.add_DecodeWorkerServicer_to_server)

    def __init__(self, default_timeout_s: float) -> None:
        self.default_timeout_s = default_timeout_s
        self._calls: dict[str, _DecodeCall] = {}  # open Decode calls, by request id
        self._streams: dict[int, TokenStreamWriter] = {}  # open StreamTokens calls, by stream id

    def attach(self, driver: Driver[DecodeEvent, DecodeAction], worker_id: str, check: RequestCheck) -> None:
        self._driver = driver
        self._check = check
        self._worker_id = worker_id

    # ---- calls of routers

    @aborts
    async def StreamTokens(self, request: worker_pb2.StreamTokensRequest, context: Context) -> None:
        if not request.stream_id:
            raise InvalidRequest("stream_id", "must not be 0")
        if request.stream_id in self._streams:
            raise InvalidRequest("stream_id", f"a stream {request.stream_id} is open already")
        self._driver.refuse_if_stopped()
        stream = self._streams[request.stream_id] = TokenStreamWriter(request.router_id)
        try:
            await stream.write_all(context.write)
        finally:
            del self._streams[request.stream_id]
            self._end_calls(stream, TokenStreamEnded("the token stream of this call has ended"))

    def _end_calls(self, stream: TokenStreamWriter, error: TandemError) -> None:
        for call in self._calls.values():
            if call.stream is stream and not call.end.done():
                call.end.set_result(error)

    @aborts
    async def Decode(self, wire: worker_pb2.DecodeRequest, context: Context) -> worker_pb2.DecodeFinished:
        request = codec.decode_sequence(wire.sequence)
        await self._check(request)
        source = None
        if wire.HasField("source"):
            source = (codec.decode_transfer_id(wire.transfer_id), codec.decode_agent(wire.source))
        if request.request_id in self._calls:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        stream = self._streams.get(wire.stream_id)
        if stream is None:
            raise TokenStreamEnded(f"no token stream {wire.stream_id} is open")
        deadline = self._driver.now() + remaining_s(context, self.default_timeout_s)
        call = _DecodeCall(wire.sequence.call, stream, asyncio.get_running_loop().create_future())
        self._calls[request.request_id] = call
        try:
            number, prefix = codec.decode_call(wire.sequence), codec.decode_prefix(wire)
            self._driver.ask(DecodeArrived(request, source, deadline, number, wire.is_move, prefix))
            end = await call.end
        finally:
            del self._calls[request.request_id]
            if not call.ended_by_machine:  # the router has cancelled, or the token stream has ended
                self._driver.post_threadsafe(DecodeCancelled(request.request_id))
        if isinstance(end, TandemError):
            raise end
        finished = _encode_done(end, call.num_tokens)
        finished.stages.extend(self._stages(end, call.num_tokens))
        return finished

    @aborts
    async def HandOver(self, request: worker_pb2.HandOverRequest, _: Context) -> worker_pb2.HandOverResponse:
        if not 0 < len(request.handoff) <= MAX_HANDOFF_BYTES:
            size = len(request.handoff)
            raise InvalidRequest("handoff", f"must have 1 to {MAX_HANDOFF_BYTES} bytes, has {size}")
        self._driver.ask(HandoffArrived(codec.decode_transfer_id(request.transfer_id), request.handoff))
        return worker_pb2.HandOverResponse()

    @aborts
    async def Move(self, request: worker_pb2.MoveRequest, _: Context) -> worker_pb2.MoveResponse:
        self._driver.ask(_decode_move(request))
        return worker_pb2.MoveResponse()

    # ---- actions of the machine

    def perform(self, action: object) -> bool:
        match action:
            case EmitTokens(tokens):
                for event in tokens:
                    call = self._calls.get(event.sequence_id)
                    if call is not None:
                        call.num_tokens += 1
                        call.stream.add(call.number, event.index, event.token)
            case AskToMove(request_ids, reason):
                for request_id in request_ids:
                    self._notify(request_id, lacks_room=reason is MoveReason.ROOM)
            case HandedOver(request_id, first_index):
                self._notify(request_id, first_index=first_index)
            case DecodeDone(request_id=request_id):
                self._end(request_id, action)
            case DecodeFailed(request_id, error):
                self._end(request_id, error)
            case _:
                return False
        return True

    def _notify(self, request_id: str, first_index: int | None = None, lacks_room: bool = False) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            notice = worker_pb2.MoveNotice(call=call.number, first_index=first_index, lacks_room=lacks_room)
            call.stream.add_notice(notice)

    def _end(self, request_id: str, end: DecodeDone | TandemError) -> None:
        call = self._calls.get(request_id)
        if call is not None and not call.end.done():
            call.ended_by_machine = True
            call.end.set_result(end)

    def fail_all(self, error: TandemError) -> None:
        """End every open call, and each token stream after its queued tokens."""
        for request_id in self._calls:
            self._end(request_id, error)
        for stream in self._streams.values():
            stream.end(error)

    def _stages(self, done: DecodeDone, num_tokens: int) -> list[worker_pb2.StageSpan]:
        attributes: dict[Stage, dict[str, object]] = {
            Stage.DECODE: {
                Attribute.TOKENS: num_tokens,
                Attribute.BLOCKS: done.num_blocks,
                Attribute.PREEMPTIONS: done.num_preemptions,
            },
            Stage.PREFILL: {
                Attribute.CACHED_TOKENS: done.cached_tokens,
                Attribute.TOKENS: done.num_prompt_tokens - done.cached_tokens,
            },
        }
        if done.finish_reason is FinishReason.HANDOFF:
            attributes[Stage.MOVE] = {Attribute.TRANSFERRED_BYTES: done.moved_bytes}
        if done.prefix is not None:
            attributes[Stage.QUEUE] = done.prefix.describe()
        if done.pull is not None:
            attributes[Stage.TRANSFER] = _describe_pull(done.pull, done.num_skipped_blocks)
        common = {Attribute.WORKER: self._worker_id}
        return stage_spans(done.timeline, done.record, SPAN_OF_STAGE, attributes, common)


def _decode_move(wire: worker_pb2.MoveRequest) -> MoveArrived | ResumeArrived:
    transfer_id = codec.decode_transfer_id(wire.transfer_id)
    match wire.WhichOneof("decision"):
        case "reader":
            agent, num_tokens = codec.decode_agent(wire.reader.agent), wire.reader.num_tokens
            return MoveArrived(wire.request_id, transfer_id, agent, num_tokens)
        case "resume":
            return ResumeArrived(wire.request_id, transfer_id)
        case _:
            raise InvalidRequest("decision", "one of reader and resume must be set, none is")


def _describe_pull(pull: PullStats, num_skipped_blocks: int) -> dict[str, object]:
    return {
        Attribute.TRANSFERRED_BYTES: pull.num_bytes,
        Attribute.TRANSFER_EXPOSED_MS: pull.exposed_s * 1e3,
        Attribute.TRANSFER_BLOCKS: pull.num_blocks,
        Attribute.TRANSFER_SKIPPED_BLOCKS: num_skipped_blocks,
        Attribute.TRANSFER_READS: pull.num_reads,
        Attribute.TRANSFER_REREAD_BLOCKS: pull.num_blocks_reread,
        Attribute.TRANSFER_GB_PER_S: pull.num_bytes / pull.read_s / 1e9 if pull.read_s else 0.0,
        Attribute.TRANSFER_LANE: pull.lane,
        Attribute.TRANSFER_OWNER: pull.owner,
    }


def _encode_done(done: DecodeDone, num_tokens: int) -> worker_pb2.DecodeFinished:
    has_moved = done.finish_reason is FinishReason.HANDOFF
    return worker_pb2.DecodeFinished(
        finish_reason=codec.FINISH_TO_WIRE[None if has_moved else done.finish_reason],
        has_moved=has_moved,
        recomputed_tokens=done.num_recomputed_tokens,
        cached_tokens=done.cached_tokens,
        queue_ms=done.timeline.seconds_in(Stage.QUEUE) * 1e3,
        prefill_ms=done.timeline.seconds_in(Stage.PREFILL) * 1e3,
        transfer_ms=done.timeline.seconds_in(Stage.TRANSFER) * 1e3,
        transfer_exposed_ms=0.0 if done.pull is None else done.pull.exposed_s * 1e3,
        transferred_bytes=0 if done.pull is None else done.pull.num_bytes,
        num_tokens=num_tokens,
        kv_block_seconds=done.kv_block_seconds,
        num_moved_blocks=0 if done.pull is None else done.pull.num_blocks,
        num_skipped_blocks=done.num_skipped_blocks,
        drafted_tokens=done.num_drafts,
        accepted_drafts=done.num_right_drafts,
        read_bytes=0 if done.prefix is None else done.prefix.num_bytes,
        read_tokens=None if done.prefix is None else done.prefix.num_tokens,
    )
