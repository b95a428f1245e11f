"""A gateway in this process, on a real port, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from cli.remote_router import remote_routers
from core.config import GatewayConfig, TelemetryConfig
from gateway.fleets import Fleets
from gateway.server import HttpServer
from tandem_client import Credentials


def over_the_wire(*addresses: str) -> Fleets:
    """Routers that run already, as `tandem gateway` has them."""
    return Fleets(remote_routers(addresses, Credentials()))


@contextlib.asynccontextmanager
async def serving_gateway(
    fleets: Fleets,
    config: GatewayConfig | None = None,
    drain_timeout_s: float = 2.0,
    telemetry: TelemetryConfig = TelemetryConfig(),  # noqa: B008 - it is frozen
) -> AsyncIterator[str]:
    """The URL of a gateway for these fleets, such as Fleets([deployment.router.calls])."""
    server = HttpServer(config or GatewayConfig(), telemetry, fleets)
    await server.start()
    try:
        yield server.url
    finally:
        await server.drain(drain_timeout_s)
