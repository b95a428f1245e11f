"""What can be known to be wrong before Ray starts is said before. Imports nothing slow: Ray waits for it."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from rich.console import Console

from core.config import RouterConfig, SecurityConfig, TandemConfig, TelemetryConfig, TransferConfig
from core.errors import ConfigError
from model_files.catalogue import CATALOGUE, default_cache_dir, is_cached
from model_files.model_source import resolve_model, usable_context

COLLECTOR_TIMEOUT_S = 1.0


def check_before_start(config: TandemConfig, console: Console) -> None:
    """Raises `TandemError`. A model of the catalogue that is not here yet is fetched."""
    check_transport(config.transfer)
    check_port(config.router)
    check_telemetry(config.telemetry)
    check_credentials(config.security)
    tell_of_silent_collector(config.telemetry, console)
    if config.cluster.address:
        return  # a joined cluster may keep its models elsewhere than this machine does
    entry = CATALOGUE.get(config.engine.model)
    if entry is not None and not is_cached(entry, default_cache_dir()):
        from cli.pull import pull

        pull(entry.name, console)
    usable_context(resolve_model(config.engine.model), config.engine.max_context)


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
    error = _why_not_listen(config.host, config.port)
    if error is not None:
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another with {flag}"
        ) from error


def check_telemetry(config: TelemetryConfig) -> None:
    """Raises `ConfigError` where the router could not show its metrics, or its spans could not be written."""
    error = _why_not_listen("0.0.0.0", config.metrics_port)
    if error is not None:
        raise ConfigError(
            f"cannot serve metrics on port {config.metrics_port} ({error.strerror}); choose another with --metrics-port"
        ) from error
    if config.trace_file:
        from runtime.telemetry import JsonLinesExporter

        JsonLinesExporter(Path(config.trace_file))


def _why_not_listen(host: str, port: int) -> OSError | None:
    if port == 0:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
