"""The port of HTTP: kept, and shown to the user. Imports no server, which only the process of a router needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from core.config import GatewayConfig
from core.errors import ConfigError
from core.service import join_address
from runtime.shared_port import PortClaim


@contextlib.contextmanager
def claimed_port(config: GatewayConfig) -> Iterator[GatewayConfig]:
    """Keep other programs off the HTTP port, which several servers of one fleet share. Raises `ConfigError`."""
    try:
        claim = PortClaim(config.host, config.port)
    except OSError as error:
        where = f"{join_address(config.host, config.port)} ({error.strerror})"
        raise ConfigError(f"cannot listen on {where}; choose another port with --http") from error
    with contextlib.closing(claim):
        yield replace(config, port=claim.port)


def gateway_line(config: GatewayConfig) -> str:
    scheme = "https" if config.tls_cert else "http"
    url = f"{scheme}://{join_address(config.host, config.port)}"
    return f"OpenAI API at {url}/v1, dashboard at {url}/dashboard"
