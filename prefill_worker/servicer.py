"""`tandem.v1.PrefillWorker`: turns each Prefill call into events for the machine, and answers with the first token."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from core.errors import InvalidRequest, TandemError
from core.lifecycle import Stage
from prefill_worker.machine import (
    OfferWithdrawn,
    PrefillAction,
    PrefillArrived,
    PrefillCancelled,
    PrefillDone,
    PrefillEvent,
    PrefillFailed,
)
from protos import codec
from runtime.driver import Driver
from runtime.rpc.grpc_server import aborts, remaining_s
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.call_record import stage_spans
from worker.request_check import RequestCheck

SPAN_OF_STAGE = {Stage.QUEUE: SpanName.PREFILL_QUEUE, Stage.PREFILL: SpanName.PREFILL_COMPUTE}


class PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    full_name = "tandem.v1.PrefillWorker"
    register = staticmethod(worker_pb2_grpc.add_PrefillWorkerServicer_to_server)

    def __init__(self, default_timeout_s: float) -> None:
        self.default_timeout_s = default_timeout_s
        self._calls: dict[str, asyncio.Future[PrefillDone]] = {}  # open calls, by request id

    def attach(self, driver: Driver[PrefillEvent, PrefillAction], worker_id: str, check: RequestCheck) -> None:
        self._driver = driver
        self._check = check
        self._worker_id = worker_id

    @aborts
    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrefillResponse:
        done = await self._compute(request, remaining_s(context, self.default_timeout_s))
        return worker_pb2.PrefillResponse(
            first_token=codec.encode_token(done.index, done.token),
            finish_reason=codec.FINISH_TO_WIRE[done.finish_reason],
            cached_tokens=done.cached_tokens,
            queue_ms=done.timeline.seconds_in(Stage.QUEUE) * 1e3,
            prefill_ms=done.timeline.seconds_in(Stage.PREFILL) * 1e3,
            stages=self._stages(done),
            kv_block_seconds=done.kv_block_seconds,
            handoff=done.handoff,
            read_bytes=0 if done.prefix is None else done.prefix.num_bytes,
            read_tokens=None if done.prefix is None else done.prefix.num_tokens,
        )

    @aborts
    async def Withdraw(
        self, request: worker_pb2.WithdrawRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WithdrawResponse:
        self._driver.ask(OfferWithdrawn(codec.decode_transfer_id(request.transfer_id)))
        return worker_pb2.WithdrawResponse()

    def _stages(self, done: PrefillDone) -> list[worker_pb2.StageSpan]:
        computed: dict[str, object] = {
            Attribute.CACHED_TOKENS: done.cached_tokens,
            Attribute.TOKENS: done.num_tokens - done.cached_tokens,
            Attribute.BLOCKS: done.num_blocks,
        }
        attributes: dict[Stage, dict[str, object]] = {Stage.PREFILL: computed}
        if done.prefix is not None:
            attributes[Stage.QUEUE] = done.prefix.describe()
        return stage_spans(done.timeline, done.record, SPAN_OF_STAGE, attributes, {Attribute.WORKER: self._worker_id})

    async def _compute(self, wire: worker_pb2.PrefillRequest, timeout_s: float) -> PrefillDone:
        request = codec.decode_sequence(wire.sequence)
        await self._check(request)
        transfer_id, reader = codec.decode_transfer_id(wire.transfer_id), codec.decode_agent(wire.reader)
        deadline = self._driver.now() + timeout_s
        call, prefix = codec.decode_call(wire.sequence), codec.decode_prefix(wire)
        arrived = PrefillArrived(request, transfer_id, reader, deadline, call, prefix)
        if request.request_id in self._calls:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        answer: asyncio.Future[PrefillDone] = asyncio.get_running_loop().create_future()
        self._calls[request.request_id] = answer
        try:
            self._driver.ask(arrived)
            return await answer
        except asyncio.CancelledError:  # the caller has cancelled
            self._driver.post_threadsafe(PrefillCancelled(request.request_id))
            raise
        finally:
            del self._calls[request.request_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # mark as read: if `ask` raised, no code has awaited the answer

    def perform(self, action: object) -> bool:
        match action:
            case PrefillDone(request_id=request_id):
                _set(self._calls.get(request_id), action)
            case PrefillFailed(request_id, error):
                _set(self._calls.get(request_id), error)
            case _:
                return False
        return True

    def fail_all(self, error: TandemError) -> None:
        for answer in self._calls.values():
            _set(answer, error)


def _set(answer: asyncio.Future[PrefillDone] | None, result: PrefillDone | TandemError) -> None:
    if answer is None or answer.done():
        return
    if isinstance(result, TandemError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
