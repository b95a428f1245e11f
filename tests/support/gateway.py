"""A gateway in this process, on a real port, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from core.config import GatewayConfig, TelemetryConfig
from gateway.fleets import Fleets
from gateway.server import listen, make_server
from gateway.tracing import SERVICE
from runtime.tracing.telemetry import Telemetry

START_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def serving_gateway(
    fleets: Fleets,
    config: GatewayConfig | None = None,
    drain_timeout_s: float = 2.0,
    telemetry: TelemetryConfig = TelemetryConfig(),  # noqa: B008 - it is frozen
) -> AsyncIterator[str]:
    """The URL of a gateway for these fleets, such as Fleets(deployment.router_address)."""
    config, ready = config or GatewayConfig(), asyncio.Event()
    tracer = Telemetry(telemetry, SERVICE, "gateway.test")
    server = make_server(config, fleets, drain_timeout_s, ready.set, tracer)
    sockets = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await ready.wait()
        scheme = "https" if config.tls_cert else "http"
        yield f"{scheme}://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.stop()
        await task
        tracer.close()
