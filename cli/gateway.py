"""HTTP: beside the gRPC of a router (`http_front`), or alone for routers that run already (`tandem gateway`)."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvloop

from cli.http_port import claimed_port, gateway_line
from cli.interrupts import run_interruptible
from cli.remote_router import RemoteRouter, remote_routers
from cli.screens.terminal import print_notice
from core.config import TandemConfig
from core.errors import TandemError
from gateway.fleets import Fleets
from gateway.router_calls import RouterCalls
from gateway.server import HttpServer
from runtime.large_blocks import give_large_blocks_back
from runtime.line_writer import LineWriter
from runtime.log_lines import log_to_stderr
from runtime.rpc.security import load_credentials
from tandem_client import Credentials as ClientCredentials


def http_front(config: TandemConfig, host: str, router: RouterCalls) -> HttpServer:
    """The HTTP server of a router on `host`. Raises `ConfigError` if the guardrail cannot be loaded."""
    return _server(replace(config, gateway=replace(config.gateway, host=host)), [router])


def _server(config: TandemConfig, routers: Sequence[RouterCalls]) -> HttpServer:
    connect = functools.partial(RemoteRouter, credentials=_channel_credentials(config))
    fleets = Fleets(routers, config.models, config.model_rules, connect)
    return HttpServer(config.gateway, config.telemetry, fleets)


def _channel_credentials(config: TandemConfig) -> ClientCredentials:
    """Certificates, but no token: the gateway must not lend its rights to HTTP clients."""
    own = load_credentials(config.security)
    return ClientCredentials(cert=own.cert, key=own.key, ca=own.ca, server_name=own.server_name)


def serve_gateway(config: TandemConfig, routers: Sequence[str]) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Raises `TandemError` if the gateway does not start."""

    log_to_stderr(logging.WARNING, LineWriter(sys.stderr))
    give_large_blocks_back()

    async def main(config: TandemConfig) -> None:
        credentials = _channel_credentials(config)
        server = _server(config, remote_routers(routers, credentials))
        starting = asyncio.create_task(server.start())
        try:
            await asyncio.shield(starting)  # a start that is broken off has nothing to drain, and logs its traceback
            gc.collect()
            gc.freeze()  # later collections, which hold up every stream, skip the objects of the imports
            for link in (link for fleet in server.fleets.fleets for link in fleet.links if link.fault):
                where = f"the router at {link.router.address} answers"
                print_notice(f"the gateway answers 503 until {where}: {link.fault}")
            print_notice(f"serving {', '.join(routers)} at {server.url}; Ctrl-C drains and stops")
            print_notice(gateway_line(config.gateway))
            raise TandemError(f"the HTTP server has failed: {await server.failed()}")
        finally:
            await starting
            await server.drain(config.router.drain_timeout_s)

    with claimed_port(config.gateway) as claimed:
        run_interruptible(functools.partial(main, replace(config, gateway=claimed)), print_notice, run=uvloop.run)
