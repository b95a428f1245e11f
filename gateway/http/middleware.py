"""The one layer around the routes: the bound of open requests, the limit of the body, metrics, and the span of a POST.

The body is read before a route runs. A body over the limit is refused as soon as its length, or the part that has
arrived, exceeds the limit. Then the connection closes. Many clients read no answer before they have sent the whole
body, and an early close would discard the answer. So the middleware receives and drops the rest for at most `LINGER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import GatewayConfig
from gateway.errors import SERVER_STOPS, ClientGone
from gateway.http.tracing import TracedRequest, Tracer, current
from gateway.metrics import GatewayMetrics

MAX_OPEN_REQUESTS = 4096  # of one process; the routers refuse excess load much earlier
BODY_TIMEOUT_S = 60.0  # for the whole body
LINGER_S = 2.0
UNBOUNDED = ("/health", "/ready", "/metrics", "/version")  # answered also when too many requests are open


class BodyRefused(Exception):
    """The body breaks a limit."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class HttpMiddleware:
    def __init__(self, app: ASGIApp, config: GatewayConfig, metrics: GatewayMetrics, tracer: Tracer) -> None:
        self._app, self._metrics, self._tracer = app, metrics, tracer
        self._max_body_bytes = config.max_body_bytes
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traced = self._tracer.begin(scope) if scope["method"] == "POST" else None
        exchange = Exchange(receive, send, self._metrics, traced)
        scope.setdefault("state", {})["arrived_at"] = exchange.arrived_at
        if traced is not None:
            scope["headers"] = traced.headers(scope["headers"])
        token = current.set(traced)
        self._num_open += 1
        try:
            await self._serve(scope, exchange)
        finally:
            self._num_open -= 1
            current.reset(token)
            exchange.end(scope)
            if traced is not None:
                self._tracer.end(traced, scope, exchange.status, exchange.is_complete, exchange.started_at)

    async def _serve(self, scope: Scope, exchange: Exchange) -> None:
        try:
            if self._num_open > MAX_OPEN_REQUESTS and scope["path"] not in UNBOUNDED:
                raise BodyRefused(503, "overloaded", f"this gateway process has {MAX_OPEN_REQUESTS} open requests")
            if scope["method"] in ("POST", "PUT", "PATCH"):
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    exchange.body = await self._read_body(scope, exchange.receive_raw)
            await self._app(scope, exchange.receive, exchange.send)
        except BodyRefused as error:
            await _refuse(exchange, error.status, error.code, str(error))
        except TimeoutError:
            if exchange.status:
                raise
            await _refuse(exchange, 408, "timeout", f"body: not complete after {BODY_TIMEOUT_S:g} s")
        except ClientGone:
            exchange.client_left = True
        except asyncio.CancelledError:  # by the server, after its drain; a stream has told its client already
            if exchange.status:
                raise
            await _refuse(exchange, 503, "unavailable", SERVER_STOPS, lingers=False)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Raises `BodyRefused` and `ClientGone`."""
        limit = self._max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
                raise _too_large(limit)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Exchange:
    """One request and its answer: what was received and sent, for the routes, the metrics and the span."""

    def __init__(self, receive: Receive, send: Send, metrics: GatewayMetrics, traced: TracedRequest | None) -> None:
        self.receive_raw, self._send, self._metrics, self._traced = receive, send, metrics, traced
        self.arrived_at, self.started_at = time.perf_counter(), time.monotonic()
        self.body: bytes | None = None
        self.status = 0
        self.client_left = self.is_complete = False
        self._is_stream = False

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self.receive_raw()
        if message["type"] == "http.disconnect" and not self.is_complete:
            self.client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = (value for name, value in message.get("headers", ()) if name == b"content-type")
            self._is_stream = next(kinds, b"").startswith(b"text/event-stream")
            if self._is_stream:
                self._metrics.num_open_streams += 1
            if self._traced is not None:
                message = {**message, "headers": self._traced.answer_headers(message.get("headers", ()))}
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def drop_rest_of_body(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (message := await self.receive_raw())["type"] == "http.request" and message.get("more_body"):
                    pass

    def end(self, scope: Scope) -> None:
        if self._is_stream:
            self._metrics.num_open_streams -= 1
        if self.client_left:
            self._metrics.count_disconnect()
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.count_request(route, self.status or 499, time.perf_counter() - self.arrived_at)


def _too_large(limit: int) -> BodyRefused:
    return BodyRefused(413, "request_too_large", f"body: larger than {limit} bytes (gateway.max_body_bytes)")


async def _refuse(exchange: Exchange, status: int, code: str, message: str, lingers: bool = True) -> None:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
    ]  # fmt: skip
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await exchange.send({"type": "http.response.start", "status": status, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
    if lingers:
        await exchange.drop_rest_of_body()
    await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
