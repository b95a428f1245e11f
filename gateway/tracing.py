"""One span for each HTTP request that makes a call: the parent of the router's spans of the same request.

    client --traceparent--> gateway.request --traceparent--> tandem.request (router)
                            `--> traceresponse and x-tandem-trace-id in the answer

`Tracing` is ASGI middleware around the whole application. It puts its own traceparent in place of the client's, so
whatever passes the header on to a router passes on the right one. It also gives every answer a request id.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.tracing.span_names import Attribute, SpanName
from runtime.tracing.telemetry import AttributeValue, SpanRecord, Telemetry
from runtime.tracing.trace_context import TraceContext

SERVICE = "tandem-gateway"
TRACE_ID_HEADER, RESPONSE_HEADER, REQUEST_ID_HEADER = b"x-tandem-trace-id", b"traceresponse", b"x-request-id"
REPLACED = (b"traceparent", b"tracestate")
FAILED = 400  # this HTTP status and higher ones
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


@dataclass(slots=True)
class _Request:
    trace: TraceContext
    request_id: bytes  # of the answer
    started_at: float
    status: int = 0
    complete: bool = False
    error_code: str = ""
    error: str = ""


_current: ContextVar[_Request | None] = ContextVar("traced request", default=None)


def note_error(code: str, message: str) -> None:
    """The request fails. A stream has sent status 200 already, so the status alone does not tell."""
    request = _current.get()
    if request is not None and not request.error:
        request.error_code, request.error = code, message


class Tracing:
    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"")
        request = _Request(
            self._telemetry.start_trace({name.decode(): headers.get(name, b"").decode("latin-1") for name in REPLACED}),
            given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}".encode(),
            time.monotonic(),
        )
        kept = [entry for entry in scope["headers"] if entry[0] not in REPLACED]
        own = [(name.encode(), value.encode("latin-1")) for name, value in request.trace.headers()]
        traced = {**scope, "headers": [*kept, *own]}

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message = {**message, "headers": _add_headers(message.get("headers", ()), request)}
            elif not message.get("more_body", False):
                request.complete = True
            await send(message)

        token = _current.set(request)
        try:
            await self._app(traced, receive, send_traced)
        finally:
            _current.reset(token)
            self._end(request, scope)

    def _end(self, request: _Request, scope: Scope) -> None:
        now, error = time.monotonic(), request.error
        if not error and request.status >= FAILED:
            error = f"HTTP status {request.status}"
        if not error and not request.complete:
            request.error_code, error = "cancelled", "the client closed the connection"
        attributes: dict[str, AttributeValue] = {
            Attribute.SPAN_KIND: "CHAIN",
            Attribute.HTTP_METHOD: scope["method"],
            Attribute.URL_PATH: scope["path"],
            Attribute.RESPONSE_ID: request.request_id.decode("latin-1"),
        }
        if request.status:
            attributes[Attribute.HTTP_STATUS] = request.status
        if error:
            attributes[Attribute.ERROR_TYPE] = request.error_code or str(request.status)
        if self._telemetry.keeps(request.trace, now - request.started_at, bool(error)):
            times = (request.started_at, now)
            record = SpanRecord(SpanName.GATEWAY, SERVICE, self._telemetry.process, *times, attributes, error)
            self._telemetry.export(request.trace, [record])


def _add_headers(headers: Iterable[tuple[bytes, bytes]], request: _Request) -> list[tuple[bytes, bytes]]:
    """The headers of the answer. A route may name the request itself, e.g. by the id of the completion."""
    added = [
        *headers,
        (TRACE_ID_HEADER, request.trace.trace_id_hex.encode()),
        (RESPONSE_HEADER, request.trace.traceparent.encode()),
    ]
    named = next((value for name, value in added if name.lower() == REQUEST_ID_HEADER), None)
    if named is None:
        added.append((REQUEST_ID_HEADER, request.request_id))
    else:
        request.request_id = named
    return added
