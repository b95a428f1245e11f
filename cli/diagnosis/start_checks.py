"""Checks of the config and of this machine before Ray starts. Ray waits for them, so no import here is slow."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path

from rich.console import Console

from cli.diagnosis.named_code import check_code
from cli.screens.terminal import print_line
from core.config import (
    EngineConfig,
    GatewayConfig,
    RouterConfig,
    SecurityConfig,
    TandemConfig,
    TelemetryConfig,
    TransferConfig,
)
from core.errors import ConfigError
from model_files.catalogue import CATALOGUE, default_cache_dir, is_cached
from model_files.model_source import resolve_model, usable_context
from runtime.shared_port import PortClaim

COLLECTOR_TIMEOUT_S = 1.0


def check_before_start(config: TandemConfig, console: Console) -> None:
    """Run every check. Fetches a model of the catalogue that is not cached. Raises `TandemError`."""
    check_transport(config.transfer)
    check_device(config.engine)
    # In a joined cluster, an earlier `tandem serve` may have left routers on the ports.
    has_ports = not config.cluster.address
    if has_ports:
        check_port(config.router)
        check_metrics_ports(config.telemetry, config.cluster.num_routers)
        if config.gateway.port:
            with contextlib.closing(PortClaim(config.router.host, config.router.port)):  # HTTP has its own
                check_http_port(config.gateway)
    check_named(config)
    warn_without_collector(config.telemetry, console)
    cache_dir = default_cache_dir()  # without one, no worker finds a model, and no command the token of the fleet
    if config.engine.name == "vllm":
        from cli.diagnosis.vllm_environment import check_machine, check_options

        check_options(config)
        if not config.cluster.address:
            check_machine(config)
        return
    if config.cluster.address:
        return  # the machines of a joined cluster may store their models at other paths
    entry = CATALOGUE.get(config.engine.model)
    if entry is not None and not is_cached(entry, cache_dir):
        from cli.commands.pull import pull

        pull(entry.name, console)
    usable_context(resolve_model(config.engine.model), config.engine.max_context)


def check_named(config: TandemConfig) -> None:
    """Raises `ConfigError` if a service of this machine could not use a file, or code, that an option names.

    `tandem serve` calls it first, and its supervisor before services start with another config. Routers with a resource
    run on other machines, with files of their own; so do the workers of a joined cluster.
    """
    check_credentials(config.security)
    if not config.cluster.router_resource:
        if config.telemetry.trace_file:
            from runtime.tracing.trace_file import JsonLinesExporter

            JsonLinesExporter(Path(config.telemetry.trace_file))
        if config.gateway.port:
            check_certificate(config.gateway)
        check_code(config)
    if config.engine.name == "vllm" and not config.cluster.address:
        from cli.diagnosis.vllm_environment import check_files

        check_files(config.vllm)


def check_transport(config: TransferConfig) -> None:
    """Raises `ConfigError` for the memory transport: `serve` starts one process for each worker."""
    if config.transport == "memory":
        raise ConfigError('transport = "memory" connects workers of one process only; choose "nixl" under [transfer]')


def check_device(config: EngineConfig) -> None:
    """Raises `ConfigError` for a device with an index: CUDA shows each worker only the GPU that Ray gave it."""
    if ":" in config.device:
        raise ConfigError(
            f"[engine] device = {config.device}: Ray chooses the GPU of each worker; set device = cuda, and "
            "CUDA_VISIBLE_DEVICES to use only some GPUs of this machine"
        )


def warn_without_collector(config: TelemetryConfig, console: Console) -> None:
    """Warn when no trace collector listens. It may start later; spans are dropped until then."""
    if not config.otlp_endpoint:
        return
    host, _, port = config.otlp_endpoint.rpartition("://")[2].rstrip("/").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), COLLECTOR_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        line = f"no trace collector answers at {config.otlp_endpoint} ({error}): traces are dropped until one does"
        print_line(console, line, "yellow")


def check_credentials(config: SecurityConfig) -> None:
    """Raises `ConfigError` if this machine cannot use a file of [security]."""
    if config.tls_cert or config.cluster_token_file:
        from runtime.rpc.security import load_credentials

        load_credentials(config)


def check_port(config: RouterConfig) -> None:
    """Raises `ConfigError` if routers could not listen. The supervisor, which claims the port, fails seconds later."""
    if config.port:
        _check_listen(config.host, config.port, f"listen on {config.host}:{config.port}", "--port", "--host")


def check_metrics_ports(config: TelemetryConfig, num_routers: int) -> None:
    """Raises `ConfigError` if a router could not serve its metrics page."""
    first = config.metrics_port
    for port in range(first, first + num_routers) if first else ():
        _check_listen("0.0.0.0", port, f"serve metrics on port {port}", "--metrics-port", "--metrics-port")


def check_http_port(config: GatewayConfig) -> None:
    """Raises `ConfigError` if the gateway could not listen."""
    _check_listen(config.host, config.port, f"listen on {config.host}:{config.port}", "--http", "--http-host")


def check_certificate(config: GatewayConfig) -> None:
    """Raises `ConfigError` if the gateway could not use its certificate."""
    if not config.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, lambda: b"")
    except (OSError, ValueError) as fault:
        raise ConfigError(
            "[gateway] tls_cert and tls_key must be a certificate and its unencrypted key, both PEM: "
            f"{config.tls_cert}, {config.tls_key}"
        ) from fault


def _check_listen(host: str, port: int, purpose: str, port_flag: str, host_flag: str) -> None:
    try:
        PortClaim(host, port).close()
    except OSError as error:
        flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
        raise ConfigError(f"cannot {purpose} ({error.strerror}); choose another with {flag}") from error
