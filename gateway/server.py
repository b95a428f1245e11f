"""The HTTP server: the application on uvicorn, in the loop of its process, on a port that several servers may share.

start    listens, and returns once connections are accepted
drain    takes no new connection, lets open answers end for at most `timeout_s`, and cuts the others off
stop     cuts off every answer
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from core.config import GatewayConfig, TelemetryConfig
from core.errors import ConfigError, TandemError
from core.service import join_address
from gateway.app import build_app
from gateway.fleets import Fleets
from gateway.http.http_protocol import BoundedHttpProtocol
from gateway.http.tls import TlsProtocol
from gateway.http.tracing import SERVICE
from runtime.shared_port import open_everywhere
from runtime.tracing.telemetry import Telemetry

BACKLOG = 2048
CHECK_INTERVAL_S = 1.0  # of every connection
LAST_BYTES_S = 0.5  # for the ends of the answers that a drain has cut off
CHECKED_AT_ONCE = 512  # connections; other work of the loop comes between


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal after a drain."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


class HttpServer:
    def __init__(self, config: GatewayConfig, telemetry: TelemetryConfig, fleets: Fleets) -> None:
        self.fleets = fleets
        self._config = config
        self._telemetry = Telemetry(telemetry, SERVICE, f"gateway.{secrets.token_hex(4)}")
        self._options = uvicorn.Config(
            build_app(config, fleets, self._telemetry),
            http=self._protocol,  # type: ignore[arg-type]  # any callable
            ws="none", lifespan="on", loop="none", proxy_headers=False,
            log_config=None, access_log=False, server_header=False,
            backlog=BACKLOG,
        )  # fmt: skip
        self._context: ssl.SSLContext | None = None
        if config.tls_cert:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(config.tls_cert, config.tls_key, lambda: b"")
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._is_draining = False
        self.port = config.port

    def _protocol(self, **options: Any) -> asyncio.BaseProtocol:
        http = BoundedHttpProtocol(**options)
        return http if self._context is None else TlsProtocol(self._context, http)

    @property
    def url(self) -> str:
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{join_address(self._config.host, self.port)}"

    async def start(self) -> None:
        """Raises `ConfigError` if the port cannot be had."""
        try:
            sockets = open_everywhere(self._config.host, self._config.port, _listen)
        except OSError as error:
            where = f"{join_address(self._config.host, self._config.port)} ({error.strerror})"
            raise ConfigError(f"cannot listen on {where}; choose another port with --http") from error
        self.port = sockets[0].getsockname()[1]
        self._server = _Uvicorn(self._options)
        self._serving = asyncio.create_task(self._server.serve(sockets))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait((self._serving, started), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await self._serving
            raise ConfigError("the HTTP server ended while it started; the log says why")
        self._checking = asyncio.create_task(self._check_connections(self._server.server_state))

    async def _check_connections(self, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for number, connection in enumerate(list(state.connections)):
                assert isinstance(connection, BoundedHttpProtocol)
                connection.check(loop.time())
                if number % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
                    await asyncio.sleep(0)

    async def failed(self) -> BaseException:
        """Wait until the server ends without a drain, and return the fault."""
        assert self._serving is not None
        assert self._checking is not None
        (ended, *_), _ = await asyncio.wait((self._serving, self._checking), return_when=asyncio.FIRST_COMPLETED)
        if self._is_draining:
            await asyncio.Event().wait()
        return ended.exception() or TandemError("the HTTP server has ended")

    async def drain(self, timeout_s: float) -> None:
        """A second call does nothing."""
        if self._server is None or self._serving is None or self._checking is None:
            return
        self._is_draining = True
        self._options.timeout_graceful_shutdown = timeout_s  # type: ignore[assignment]  # any number works
        self._server.should_exit = True
        await asyncio.wait((self._serving,))
        if self._serving.exception() is not None:
            await self._server.shutdown()  # uvicorn has left its sockets open
        self._checking.cancel()
        connections = self._server.server_state.connections
        if connections:
            await asyncio.sleep(LAST_BYTES_S)
            for connection in list(connections):
                assert isinstance(connection, BoundedHttpProtocol)
                connection.abort()
        self._server = None
        await asyncio.to_thread(self._telemetry.close)

    async def stop(self) -> None:
        await self.drain(0.0)


def _listen(listening: socket.socket, address: tuple[Any, ...]) -> None:
    """Share the port with other servers that listen so."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(address)
    listening.listen(BACKLOG)
    listening.setblocking(False)
