"""The middleware ends every refusal, also one whose client still sends its body while the server stops."""

from __future__ import annotations

import asyncio
from typing import Any

from core.config import GatewayConfig, TelemetryConfig
from core.errors import Unauthenticated
from gateway.http.middleware import HttpMiddleware
from gateway.http.tracing import SERVICE, Tracer
from gateway.metrics import GatewayMetrics
from runtime.tracing.telemetry import Telemetry


async def test_a_refusal_that_still_receives_a_body_ends_whole_when_the_server_stops() -> None:
    sent, lingers = list[dict[str, Any]](), asyncio.Event()

    async def authorize(_: Any) -> None:
        raise Unauthenticated("unknown")

    async def receive() -> Any:
        lingers.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError("a refused request reaches no route")

    tracer = Tracer(Telemetry(TelemetryConfig(), SERVICE, "gateway"))
    middleware = HttpMiddleware(app, GatewayConfig(), authorize, GatewayMetrics(), tracer)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"100")]}
    request = asyncio.create_task(middleware(scope, receive, send))
    await lingers.wait()
    assert [message.get("more_body") for message in sent] == [None, True]
    request.cancel()
    await asyncio.wait([request])
    assert not request.cancelled(), "uvicorn would log an exception of the application"
    assert request.exception() is None
    assert (sent[0]["status"], sent[-1]["body"], sent[-1]["more_body"]) == (401, b"", False)
