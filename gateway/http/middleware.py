"""The one layer around the routes: open requests, the key of the caller, the body, errors, metrics, the span of a POST.

A request is refused by its head if too many are open or its key is unknown, then by its body (gateway/http/body.py).
After a refusal the connection closes. Many clients read no answer before they have sent the whole body, and an early
close would discard the answer. So the middleware receives and drops the rest for at most `LINGER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import GatewayConfig
from gateway.errors import ApiError, ClientGone, api_error, server_stops
from gateway.http.body import BodyReader
from gateway.http.http_protocol import READ_BY_THE_MIDDLEWARE
from gateway.http.tracing import TracedRequest, current
from gateway.metrics import GatewayMetrics
from runtime.tracing.telemetry import Telemetry

MAX_OPEN_REQUESTS = 4096  # open HTTP requests of a process; beyond: status 503
LINGER_S = 2.0
UNBOUNDED = ("/health", "/ready", "/metrics", "/version")  # answered also when too many requests are open


class HttpMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        authorize: Callable[[Scope], Awaitable[None]],
        metrics: GatewayMetrics,
        telemetry: Telemetry,
    ) -> None:
        """`authorize` raises `TandemError` for a head whose API key opens no call."""
        self._app, self._authorize, self._metrics, self._telemetry = app, authorize, metrics, telemetry
        self._bodies = BodyReader(config.max_body_bytes)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traced = TracedRequest(self._telemetry, scope) if scope["method"] == "POST" else None
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
                traced.end(exchange.status, exchange.is_complete)

    async def _serve(self, scope: Scope, exchange: Exchange) -> None:
        try:
            await self._take(scope, exchange)
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.client_left = True
        except asyncio.CancelledError:  # by the server, after its drain; a stream has told its client already
            if exchange.status:
                raise
            exchange.has_unread_body = False
            await exchange.refuse(api_error(server_stops()))
        except Exception as error:
            if exchange.status:
                raise
            await exchange.refuse(api_error(error))

    async def _take(self, scope: Scope, exchange: Exchange) -> None:
        """Read the request, unless its head refuses it. Raises `ApiError`, `TandemError` and `ClientGone`."""
        exchange.has_unread_body = scope["method"] in READ_BY_THE_MIDDLEWARE
        if self._num_open > MAX_OPEN_REQUESTS and scope["path"] not in UNBOUNDED:
            message = f"this gateway process has {MAX_OPEN_REQUESTS} open requests"
            raise ApiError(503, message, "server_error", code="overloaded", headers={"retry-after": "1"})
        if exchange.has_unread_body:
            await self._authorize(scope)
            exchange.body = await self._bodies.read(scope, exchange.receive_raw)
            exchange.has_unread_body = False


class Exchange:
    """One request and its answer: what was received and sent, for the routes, the metrics and the span."""

    def __init__(self, receive: Receive, send: Send, metrics: GatewayMetrics, traced: TracedRequest | None) -> None:
        self.receive_raw, self._send, self._metrics, self._traced = receive, send, metrics, traced
        self.arrived_at = time.perf_counter()
        self.body: bytes | None = None
        self.has_unread_body = False
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

    async def refuse(self, error: ApiError) -> None:
        """Answer, drop what the client still sends, and close the connection."""
        answer = error.response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": answer.body, "more_body": True})
        if self.has_unread_body:
            await self._drop_rest_of_body()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drop_rest_of_body(self) -> None:
        """A server that stops ends the wait, and the answer is whole all the same."""
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
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
