"""The end of every generating route: a stream of server-sent events, or one JSON object."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.field_names import named
from gateway.fleets import ServedModel
from gateway.formats.encoded import json_pieces
from gateway.formats.form import AnswerForm
from gateway.formats.outputs import AnswerHead
from gateway.guardrails import Guardrail, Message
from gateway.http.connection import EventStream, while_connected
from gateway.metrics import GatewayMetrics
from gateway.router_calls import Chunk, Sink
from gateway.routes.calls import CallContext, warning_headers
from gateway.routes.sinks import AnswerSink, GuardedSink, Renumbered
from gateway.schemas.sampling import StreamOptions
from runtime.rpc.api_keys import FOLLOWING
from tandem_client.stubs.inference_pb2 import Finished, GenerateRequest

SEND_BYTES = 64 * 1024


class Given(NamedTuple):
    """A body as the router takes it, but for the name of the model and the id."""

    wire: GenerateRequest
    num_chars: int  # of all messages or prompts; a token id counts as one
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: one call of the router for each prompt. Choice k of prompt i is choice i * n + k."""

    id: str
    model: ServedModel
    requests: Sequence[GenerateRequest]
    prompts: Sequence[Sequence[Message]]  # for the guardrail; one for each request
    guardrail: Guardrail | None
    warnings: Sequence[str]
    context: CallContext
    names: Mapping[str, str]  # of fields, for `named`

    def head(self, options: StreamOptions | None = None) -> AnswerHead:
        first, with_receipt = self.requests[0], self.context.wants_receipt or bool(options and options.include_receipt)
        return AnswerHead(
            self.id,
            self.model.name,
            int(time.time()),
            frozenset(self.model.info.eos_token_ids),
            tuple(first.stop.stop_strings),
            names_tool=bool(first.chat.tool_choice.name),
            with_token_ids=first.return_prompt_token_ids,
            num_choices=first.n,
            with_usage=with_receipt or bool(options and options.include_usage),
            with_receipt=with_receipt,
        )

    def generate(self, sink: AnswerSink) -> Coroutine[Any, Any, None]:
        """Generates into `sink`. Raises the error of the first call that fails; the others are then cancelled.

        Raises `ApiError` at once if the guardrail refuses.
        """
        if self.guardrail is None:
            return self._generate(sink)
        checked = GuardedSink(sink, self.guardrail, self.prompts, self.requests[0].n)
        return checked.check_all(self._generate(checked))

    async def _generate(self, sink: Sink) -> None:
        if len(self.requests) == 1:
            await self._generate_one(self.requests[0], sink)
            return
        calls: list[asyncio.Task[None]] = []
        first_choice = 0
        try:
            for number, request in enumerate(self.requests, 1):
                call = self._generate_one(request, Renumbered(sink, first_choice), len(self.requests) - number)
                calls.append(asyncio.create_task(call))
                first_choice += request.n
                await asyncio.sleep(0)  # the call begins, in 1 to 4 ms of the loop
                if calls[-1].done() and calls[-1].exception() is not None:
                    break
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            for task in calls:
                if task.done():
                    task.result()
        finally:
            await _cancel_in_turns(calls)

    async def _generate_one(self, request: GenerateRequest, sink: Sink, num_following: int = 0) -> None:
        request.min_interval_ms = self.context.min_interval_ms
        metadata = (*self.context.metadata, (FOLLOWING, str(num_following)))
        with named(self.names):
            await self.model.router.generate(request, sink, self.context.timeout_s, metadata)

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.id} | warning_headers(self.warnings)


async def _cancel_in_turns(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Each turn of the loop ends one call, which takes 2 ms for 16 choices. A second cancellation ends all at once."""
    try:
        for task in tasks:
            if task.cancel():
                await asyncio.wait((task,))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AnswerCollector:
    """The sink of an answer that is one object."""

    is_full = False

    def __init__(self, form: AnswerForm) -> None:
        self._form = form

    def when_room(self, _: Callable[[], None]) -> None:
        raise AssertionError("a collector is never full")

    def chunk(self, chunk: Chunk) -> None:
        self._form.collect(chunk)

    def finished(self, finished: Finished) -> None:
        self._form.fold(self._form.of_finished(finished))

    def filtered(self, choice: int) -> None:
        self._form.fold(self._form.of_filtered(choice))


async def answer(request: Request, call: Call, form: AnswerForm, as_stream: bool | None) -> Response:
    metrics: GatewayMetrics = request.app.state.metrics
    metrics.added_before.observe(time.perf_counter() - request.state.arrived_at)
    if not as_stream:
        await while_connected(request.receive, call.generate(AnswerCollector(form)))
        return ObjectResponse(json_pieces(form.result()), call.headers())
    stream = EventStream(form, call.headers(), metrics.added_per_message.observe)
    await stream.begin(call.generate(stream), request.receive)
    return stream


class ObjectResponse(Response):
    """One JSON object. A long one is sent in pieces, each in a turn of the loop of its own, once the client has read
    most of the pieces before. In the turn of its loss, a connection does not know yet that nothing may be written."""

    def __init__(self, pieces: deque[bytes], headers: dict[str, str]) -> None:
        self._pieces = pieces
        length = {"content-length": str(sum(map(len, pieces)))}
        super().__init__(None, 200, headers | length, "application/json")

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        part, pieces = bytearray(), self._pieces
        while pieces:
            part += pieces.popleft()
            if not pieces or len(part) >= SEND_BYTES:
                await send({"type": "http.response.body", "body": bytes(part), "more_body": bool(pieces)})
                part.clear()
                await asyncio.sleep(0)
