"""One span for each HTTP request that makes a call: the parent of the router's spans of the same request.

    client --traceparent--> gateway.request --traceparent--> tandem.request (router)
                            `--> traceresponse and x-tandem-trace-id in the answer

`HttpMiddleware` puts the traceparent of this span in place of the client's, so a route that passes the header on to a
router passes on the right one. Every answer to a POST also gets a request id.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import Scope

from core.errors import shortened
from runtime.tracing.span_names import Attribute, SpanName
from runtime.tracing.telemetry import AttributeValue, SpanRecord, Telemetry

SERVICE = "tandem-gateway"
TRACE_ID_HEADER, RESPONSE_HEADER, REQUEST_ID_HEADER = b"x-tandem-trace-id", b"traceresponse", b"x-request-id"
REPLACED = (b"traceparent", b"tracestate")
MAX_PATH_CHARS = 256  # of a span
FAILED = 400  # this HTTP status and higher ones
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class TracedRequest:
    """The span of one request."""

    def __init__(self, telemetry: Telemetry, scope: Scope) -> None:
        self._telemetry, self._scope, self._started_at = telemetry, scope, time.monotonic()
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"")
        self.trace = telemetry.start_trace(
            {name.decode(): headers.get(name, b"").decode("latin-1") for name in REPLACED}
        )
        # The id of the answer.
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}".encode()
        self.error_code = self.error = ""

    def headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers of the request, with the trace context of this span."""
        kept = [entry for entry in given if entry[0] not in REPLACED]
        return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in self.trace.headers())]

    def answer_headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers of the answer. A route may name the request itself, e.g. by the id of the completion."""
        added = [
            *given,
            (TRACE_ID_HEADER, self.trace.trace_id_hex.encode()),
            (RESPONSE_HEADER, self.trace.traceparent.encode()),
        ]
        named = next((value for name, value in added if name.lower() == REQUEST_ID_HEADER), None)
        if named is None:
            added.append((REQUEST_ID_HEADER, self.request_id))
        else:
            self.request_id = named
        return added

    def end(self, status: int, is_complete: bool) -> None:
        """`status`: 0 if the answer never began."""
        now, error = time.monotonic(), self.error
        if not error and status >= FAILED:
            error = f"HTTP status {status}"
        if not error and not is_complete:
            self.error_code, error = "cancelled", "the client closed the connection"
        attributes: dict[str, AttributeValue] = {
            Attribute.SPAN_KIND: "CHAIN",
            Attribute.HTTP_METHOD: self._scope["method"],
            Attribute.URL_PATH: shortened(self._scope["path"], MAX_PATH_CHARS),
            Attribute.RESPONSE_ID: self.request_id.decode("latin-1"),
        }
        if status:
            attributes[Attribute.HTTP_STATUS] = status
        if error:
            attributes[Attribute.ERROR_TYPE] = self.error_code or str(status)
        if self._telemetry.keeps(self.trace, now - self._started_at, bool(error)):
            times = (self._started_at, now)
            record = SpanRecord(SpanName.GATEWAY, SERVICE, self._telemetry.process, *times, attributes, error)
            self._telemetry.export(self.trace, [record])


current: ContextVar[TracedRequest | None] = ContextVar("traced request", default=None)


def note_error(code: str, message: str) -> None:
    """The request fails. A stream has sent status 200 already, so the status alone does not tell."""
    request = current.get()
    if request is not None and not request.error:
        request.error_code, request.error = code, message
