"""The gateway beside a fleet: inside `tandem serve --http`, or alone as `tandem gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence

from rich.console import Console

from core.config import TandemConfig
from gateway.processes import gateway
from gateway.server import GatewaySpec
from runtime.rpc.security import Credentials, load_credentials
from tandem_client import Credentials as ClientCredentials

PrintLine = Callable[[str], None]


def gateway_spec(config: TandemConfig, routers: Sequence[str], credentials: Credentials) -> GatewaySpec:
    """The gateway gets certificates, but no token: it must not lend its rights to HTTP clients."""
    channel = ClientCredentials(
        cert=credentials.cert, key=credentials.key, ca=credentials.ca, server_name=credentials.server_name
    )
    return GatewaySpec(
        config.gateway,
        tuple(routers),
        config.models,
        config.model_rules,
        channel,
        config.router.drain_timeout_s,
        config.telemetry,
    )


def gateway_line(url: str) -> str:
    return f"OpenAI API at {url}/v1, dashboard at {url}/dashboard"


@contextlib.asynccontextmanager
async def gateway_beside(
    config: TandemConfig, routers: Sequence[str], credentials: Credentials, print_line: PrintLine
) -> AsyncIterator[None]:
    """The gateway of a fleet that serves; without a configured port, nothing."""
    if not config.gateway.port:
        yield
        return
    async with gateway(gateway_spec(config, routers, credentials), print_line) as url:
        print_line(gateway_line(url))
        yield


def serve_gateway(config: TandemConfig, routers: Sequence[str], console: Console) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `TandemError` if the gateway does not start."""
    spec = gateway_spec(config, routers, load_credentials(config.security))

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def main() -> None:
        interrupted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
        async with gateway(spec, print_line) as url:
            print_line(f"serving {', '.join(routers)} at {url}; Ctrl-C drains and stops")
            print_line(gateway_line(url))
            await interrupted.wait()

    asyncio.run(main())
