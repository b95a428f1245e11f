"""What can be known to be wrong before Ray starts is said before. Imports nothing slow: Ray waits for it."""

from __future__ import annotations

import errno
import socket

from rich.console import Console

from core.config import RouterConfig, SecurityConfig, TandemConfig, TelemetryConfig, TransferConfig
from core.errors import ConfigError
from engine.catalogue import CATALOGUE, default_cache_dir, is_cached
from engine.model_source import resolve_model

COLLECTOR_TIMEOUT_S = 1.0


def check_before_start(config: TandemConfig, console: Console) -> None:
    """Raises `TandemError`. A model of the catalogue that is not here yet is fetched."""
    check_transport(config.transfer)
    check_port(config.router)
    check_credentials(config.security)
    tell_of_silent_collector(config.telemetry, console)
    if config.cluster.address:
        return  # a joined cluster may keep its models elsewhere than this machine does
    entry = CATALOGUE.get(config.engine.model)
    if entry is not None and not is_cached(entry, default_cache_dir()):
        from cli.pull import pull

        pull(entry.name, console)
    resolve_model(config.engine.model)


def check_transport(config: TransferConfig) -> None:
    """Raises `ConfigError` for the transport that cannot leave a process: `serve` starts one for each worker."""
    if config.transport == "memory":
        raise ConfigError('transport = "memory" joins workers of one process only; choose "nixl" under [transfer]')


def tell_of_silent_collector(config: TelemetryConfig, console: Console) -> None:
    """It may come later, and traces are worth no refusal; but spans are dropped until then, and nobody else says so."""
    if not config.otlp_endpoint:
        return
    host, _, port = config.otlp_endpoint.rpartition("://")[2].rstrip("/").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), COLLECTOR_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        console.print(
            f"nothing answers at {config.otlp_endpoint} ({error}): traces are dropped until something does",
            style="yellow", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def check_credentials(config: SecurityConfig) -> None:
    """Raises `ConfigError` where a file of [security] cannot be used on this machine."""
    if config.tls_cert or config.cluster_token_file:
        from runtime.security import load_credentials

        load_credentials(config)


def check_port(config: RouterConfig) -> None:
    """Raises `ConfigError` where the router could not listen: seconds before the router itself could."""
    if config.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another with {flag}"
            ) from error
