"""One gateway process: the application on uvicorn, on a port that gateway processes share.

`serve` runs until `stop` or SIGTERM. It then takes no new connection, lets open answers end for at most
`drain_timeout_s`, and cuts the others off.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from core.config import GatewayConfig, ModelConfig, ModelRuleConfig, TelemetryConfig
from gateway.app import build_app
from gateway.fleets import Fleets, connect_once
from gateway.http_protocol import BoundedHttpProtocol
from gateway.tracing import SERVICE, Tracing
from runtime.tracing.telemetry import Telemetry
from tandem_client import Credentials

BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than the idle time of common clients and proxies, which then never meet a closed connection


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """Everything that a gateway process needs to know. It travels to the process as a pickle over a pipe."""

    config: GatewayConfig
    routers: tuple[str, ...]  # of the own fleet
    models: tuple[ModelConfig, ...] = ()
    rules: tuple[ModelRuleConfig, ...] = ()
    credentials: Credentials = field(default_factory=Credentials)  # for the channels; no token and no key
    drain_timeout_s: float = 10.0
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def fleets(self) -> Fleets:
        return Fleets(self.routers, self.models, self.rules, lambda address: connect_once(address, self.credentials))


class GatewayServer(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal after a drain."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address of `host`, shared with the other gateway processes. Raises `OSError`."""
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                listening = socket.socket(family)
            except OSError:  # a name may resolve to IPv6 on a machine without it
                continue
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def make_server(
    config: GatewayConfig, fleets: Fleets, drain_timeout_s: float, on_ready: Callable[[], None], telemetry: Telemetry
) -> GatewayServer:
    """A server for the running event loop."""
    options = uvicorn.Config(
        Tracing(build_app(config, fleets), telemetry),
        http=BoundedHttpProtocol, ws="none", lifespan="on", loop="none",
        log_config=None, access_log=False, server_header=False,
        backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        ssl_certfile=config.tls_cert or None, ssl_keyfile=config.tls_key or None,
    )  # fmt: skip
    return GatewayServer(options, on_ready)


async def serve(spec: GatewaySpec, on_ready: Callable[[Fleets], None]) -> None:
    """Serve until SIGTERM. `on_ready` is called once connections are accepted."""
    fleets = spec.fleets()
    telemetry = Telemetry(spec.telemetry, SERVICE, f"gateway.{secrets.token_hex(4)}")
    server = make_server(spec.config, fleets, spec.drain_timeout_s, lambda: on_ready(fleets), telemetry)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    try:
        await server.serve(listen(spec.config.host, spec.config.port))
    finally:
        await asyncio.to_thread(telemetry.close)
