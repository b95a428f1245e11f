"""The end of every generating route: a stream of server-sent events, or one JSON object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.calls import CallContext, generate, json_bytes, warning_headers
from gateway.connection import EventFormat, EventStream, first_of, while_connected
from gateway.fleets import ServedModel
from gateway.guardrails import Guardrail, Message
from gateway.metrics import GatewayMetrics
from gateway.outputs import AnswerHead, Event, Events, guarded
from tandem_client import GenerateRequest


class AnswerForm(Protocol):
    """Collects events into one object."""

    def push(self, event: Event) -> None: ...

    def result(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: one gRPC request for each prompt."""

    id: str
    model: ServedModel
    requests: Sequence[GenerateRequest]
    prompts: Sequence[Sequence[Message]]  # for the guardrail; one for each request
    guardrail: Guardrail | None
    warnings: Sequence[str]
    context: CallContext

    def head(self) -> AnswerHead:
        stop_strings = tuple(self.requests[0].stop.stop_strings)
        return AnswerHead(
            self.id, self.model.name, int(time.time()), frozenset(self.model.info.eos_token_ids), stop_strings
        )

    def events(self) -> Events:
        responses = generate(self.model.client, self.requests, self.context)
        if self.guardrail is None:
            return cast(Events, responses)
        return guarded(responses, self.guardrail, self.prompts, self.requests[0].n or 1)

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.id} | warning_headers(self.warnings)


async def answer_stream(request: Request, call: Call, form: EventFormat[Event]) -> Response:
    """The stream begins with the first token, so that a refusal before it has its own status."""
    _count_time_before(request)
    events = call.events()
    first = await first_of(request.receive, events)
    metrics: GatewayMetrics = request.app.state.metrics
    return EventStream(first, events, form, call.headers(), metrics.added_per_message.observe)


async def answer_object(request: Request, call: Call, form: AnswerForm) -> Response:
    async def collect() -> None:
        async with aclosing(call.events()) as events:
            async for event in events:
                form.push(event)

    _count_time_before(request)
    await while_connected(request.receive, collect())
    return Response(json_bytes(form.result()), 200, call.headers(), "application/json")


def _count_time_before(request: Request) -> None:
    metrics: GatewayMetrics = request.app.state.metrics
    metrics.added_before.observe(time.perf_counter() - request.state.arrived_at)
