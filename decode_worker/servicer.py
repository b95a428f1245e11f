"""`tandem.v1.DecodeWorker`: turns each Decode call into events for the machine, and streams the tokens back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from core.errors import InvalidRequest, TandemError
from core.lifecycle import Stage
from decode_worker.machine import (
    DecodeAction,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeEvent,
    DecodeFailed,
    EmitTokens,
)
from protos import codec, worker_pb2, worker_pb2_grpc
from runtime.driver import Driver
from runtime.grpc_server import abort, remaining_s
from runtime.telemetry import Attribute, AttributeValue, SpanName, Telemetry, extract

SPAN_OF_STAGE = {
    Stage.QUEUE: SpanName.DECODE_QUEUE,
    Stage.PREFILL: SpanName.DECODE_PREFILL,
    Stage.TRANSFER: SpanName.DECODE_TRANSFER,
    Stage.DECODE: SpanName.DECODE_COMPUTE,
}

# The tokens of a step are sent while the model runs the next step. That step first builds its batch in Python. If the
# event loop wrote to the streams at that time, both would compete for the interpreter, and the model would start later.
EMIT_AFTER_S = 0.001

# Bounded by the request: at most max_tokens entries and the end.
Stream = asyncio.Queue[EmitTokens | DecodeDone | TandemError]


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    full_name = "tandem.v1.DecodeWorker"
    register = staticmethod(worker_pb2_grpc.add_DecodeWorkerServicer_to_server)

    def __init__(self, default_timeout_s: float, telemetry: Telemetry) -> None:
        self._default_timeout_s = default_timeout_s
        self._telemetry = telemetry
        self._calls: dict[str, Stream] = {}  # open calls, by request id
        self._held_back: list[tuple[Stream, EmitTokens]] = []  # of the newest step, for EMIT_AFTER_S

    def attach(self, driver: Driver[DecodeEvent, DecodeAction], worker_id: str) -> None:
        self._driver = driver
        self._worker_id = worker_id

    async def Decode(self, request: worker_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await self._serve(request, context)
        except TandemError as error:
            await abort(context, error)

    async def _serve(self, wire: worker_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        request = codec.decode_sequence(wire.sequence)
        source = None
        if wire.HasField("source"):
            source = (codec.decode_transfer_id(wire.transfer_id), codec.decode_agent(wire.source))
        if request.request_id in self._calls:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        deadline = self._driver.now() + remaining_s(context, self._default_timeout_s)
        stream: Stream = asyncio.Queue()
        self._calls[request.request_id] = stream
        item: EmitTokens | DecodeDone | TandemError | None = None
        try:
            self._driver.ask(DecodeArrived(request, source, deadline, codec.decode_call(wire.sequence)))
            while isinstance(item := await stream.get(), EmitTokens):
                await context.write(worker_pb2.DecodeResponse(tokens=_encode_tokens(item)))
            if isinstance(item, TandemError):
                raise item
            self._draw_spans(item, context)
            await context.write(worker_pb2.DecodeResponse(finished=_encode_done(item)))
        finally:
            del self._calls[request.request_id]
            if item is None or isinstance(item, EmitTokens):  # the caller has cancelled
                self._driver.post_threadsafe(DecodeCancelled(request.request_id))

    def perform(self, action: object) -> bool:
        match action:
            case EmitTokens():
                self._hold_back(action)
            case DecodeDone(request_id=request_id):
                self._emit()
                self._put(request_id, action)
            case DecodeFailed(request_id, error):
                self._emit()
                self._put(request_id, error)
            case _:
                return False
        return True

    def _hold_back(self, emitted: EmitTokens) -> None:
        if (stream := self._calls.get(emitted.request_id)) is None:
            return
        if not self._held_back:
            asyncio.get_running_loop().call_later(EMIT_AFTER_S, self._emit)
        self._held_back.append((stream, emitted))  # the stream, not the id: a later call may have the same id

    def _emit(self) -> None:
        held_back, self._held_back = self._held_back, []
        for stream, emitted in held_back:
            stream.put_nowait(emitted)

    def fail_all(self, error: TandemError) -> None:
        self._emit()
        for request_id in self._calls:
            self._put(request_id, error)

    def _put(self, request_id: str, item: EmitTokens | DecodeDone | TandemError) -> None:
        stream = self._calls.get(request_id)
        if stream is not None:
            stream.put_nowait(item)

    def _draw_spans(self, done: DecodeDone, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        attributes: dict[str, AttributeValue] = {
            Attribute.WORKER: self._worker_id,
            Attribute.CACHED_TOKENS: done.cached_tokens,
        }
        if done.pull is not None:
            attributes[Attribute.TRANSFERRED_BYTES] = done.pull.num_bytes
            attributes[Attribute.TRANSFER_EXPOSED_MS] = done.pull.exposed_s * 1e3
        parent = extract(context.invocation_metadata())
        self._telemetry.record_timeline(done.timeline, SPAN_OF_STAGE, parent, attributes)


def _encode_tokens(emitted: EmitTokens) -> worker_pb2.SampledTokens:
    numbered = enumerate(emitted.tokens, start=emitted.index)
    return worker_pb2.SampledTokens(tokens=[codec.encode_token(index, token) for index, token in numbered])


def _encode_done(done: DecodeDone) -> worker_pb2.DecodeFinished:
    return worker_pb2.DecodeFinished(
        finish_reason=codec.FINISH_TO_WIRE[done.finish_reason],
        cached_tokens=done.cached_tokens,
        queue_ms=done.timeline.seconds_in(Stage.QUEUE) * 1e3,
        prefill_ms=done.timeline.seconds_in(Stage.PREFILL) * 1e3,
        transfer_ms=done.timeline.seconds_in(Stage.TRANSFER) * 1e3,
        transfer_exposed_ms=0.0 if done.pull is None else done.pull.exposed_s * 1e3,
        transferred_bytes=0 if done.pull is None else done.pull.num_bytes,
    )
