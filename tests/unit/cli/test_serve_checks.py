"""`tandem serve` reports faults of the config and of the machine before it starts Ray."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands.serve import gpu_use
from cli.diagnosis.start_checks import (
    check_before_start,
    check_credentials,
    check_device,
    check_gateway,
    check_port,
    check_telemetry,
    warn_without_collector,
)
from core.config import (
    ClusterConfig,
    EngineConfig,
    GatewayConfig,
    RouterConfig,
    SecurityConfig,
    TandemConfig,
    TelemetryConfig,
)
from core.errors import ConfigError
from fleet.law.claims import GpuUse
from runtime.shared_port import PortClaim


def fake_config(**parts: EngineConfig | TelemetryConfig | ClusterConfig) -> TandemConfig:
    """A config that passes every check, with `parts` replaced."""
    config = TandemConfig(engine=EngineConfig(model="fake:tiny"), router=RouterConfig(port=0))
    return replace(config, **parts)  # type: ignore[arg-type]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_the_error_for_a_taken_port_names_the_flag_that_changes_it() -> None:
    with taken_port() as port:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .* --port"):
            check_port(RouterConfig(port=port))
        with pytest.raises(ConfigError, match=f"metrics on port {port} .* --metrics-port"):
            check_before_start(fake_config(telemetry=TelemetryConfig(metrics_port=port)), Console())
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*; choose another with --http$"):
            check_gateway(GatewayConfig(port=port))
    check_port(RouterConfig(port=0))


def test_each_router_needs_a_metrics_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(_: str, port: int) -> PortClaim:
        if port == 9003:
            raise OSError(98, "Address already in use")
        return PortClaim("127.0.0.1", 0)

    monkeypatch.setattr("cli.diagnosis.start_checks.PortClaim", claim)
    config = TelemetryConfig(metrics_port=9001)
    check_telemetry(config, 2)
    with pytest.raises(ConfigError, match=r"metrics on port 9003 .* --metrics-port"):
        check_telemetry(config, 3)


def test_a_port_that_routers_of_another_fleet_share_is_taken() -> None:
    claim = PortClaim("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{claim.port} .* --port"):
            check_port(RouterConfig(port=claim.port))
    finally:
        claim.close()
    check_port(RouterConfig(port=claim.port))


def test_the_error_for_an_unwritable_trace_file_names_its_option(tmp_path: Path) -> None:
    nowhere = TelemetryConfig(trace_file=str(tmp_path / "none" / "spans.jsonl"))
    with pytest.raises(ConfigError, match=r"\[telemetry\] trace_file: cannot write .*/none/spans.jsonl"):
        check_before_start(fake_config(telemetry=nowhere), Console())
    here = TelemetryConfig(trace_file=str(tmp_path / "spans.jsonl"))
    check_before_start(fake_config(telemetry=here), Console())


@pytest.mark.parametrize("model", ["fake:tiny", "random:llama-tiny"])
def test_a_context_longer_than_the_limit_of_the_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^max_context must be at most .*, is 1000000$"):
        check_before_start(fake_config(engine=EngineConfig(model=model, max_context=10**6)), Console())
    check_before_start(fake_config(engine=EngineConfig(model=model)), Console())


def test_the_error_for_an_unreadable_credentials_file_names_its_option() -> None:
    with pytest.raises(ConfigError, match=r"\[security\] cluster_token_file: cannot read /no/token"):
        check_credentials(SecurityConfig(cluster_token_file="/no/token"))
    with pytest.raises(ConfigError, match=r"\[security\] tls_cert: cannot read /no/host.pem"):
        check_credentials(SecurityConfig(tls_cert="/no/host.pem", tls_key="/no/host.key", tls_ca="/no/ca.pem"))
    check_credentials(SecurityConfig())


def test_a_missing_collector_only_causes_a_warning() -> None:
    console = Console(file=io.StringIO())
    with taken_port() as port:
        warn_without_collector(TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}"), console)
    warn_without_collector(TelemetryConfig(), console)
    assert not console.file.getvalue()  # type: ignore[attr-defined]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but not listening
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        warn_without_collector(TelemetryConfig(otlp_endpoint=endpoint), console)
    assert f"no trace collector answers at {endpoint} " in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_certificate_of_the_gateway_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    for name in ("cert.pem", "missing.pem"):
        config = GatewayConfig(tls_cert=str(tmp_path / name), tls_key=str(tmp_path / name))
        with pytest.raises(ConfigError, match=r"\[gateway\] tls_cert and tls_key must be a certificate"):
            check_gateway(config)


@pytest.mark.parametrize(
    ("options", "build", "joined", "use"),
    [
        ({"device": "cpu"}, "2.11.0", False, GpuUse.NEVER),
        ({"device": "cuda"}, "2.11.0+cpu", False, GpuUse.ALWAYS),
        ({"device": "auto"}, "2.11.0", False, GpuUse.IF_PRESENT),
        ({"device": "auto"}, "2.11.0+cpu", False, GpuUse.NEVER),
        ({"device": "auto"}, "2.11.0+cpu", True, GpuUse.IF_PRESENT),
        ({"device": "cuda", "model": "fake:tiny"}, "2.11.0", False, GpuUse.NEVER),
    ],
)
def test_workers_use_gpus_by_the_device_and_the_build_of_torch_on_this_machine(
    options: dict[str, str], build: str, joined: bool, use: GpuUse
) -> None:
    assert gpu_use(EngineConfig(**options), build, joined) is use  # type: ignore[arg-type]


def test_a_device_with_an_index_is_refused_because_ray_chooses_it() -> None:
    config = EngineConfig()
    object.__setattr__(config, "device", "cuda:1")
    with pytest.raises(ConfigError, match=r"device = cuda:1: Ray chooses the GPU .* CUDA_VISIBLE_DEVICES"):
        check_device(config)
    for device in ("auto", "cpu", "cuda"):
        check_device(EngineConfig(device=device))


def test_in_a_joined_cluster_ports_are_left_alone_and_certificates_are_read() -> None:
    """An earlier fleet may listen on the ports."""
    with taken_port() as port:
        cluster, router = ClusterConfig(address="127.0.0.1:1"), RouterConfig(port=port)
        check_before_start(TandemConfig(cluster=cluster, router=router, gateway=GatewayConfig(port=port)), Console())
        wrong = GatewayConfig(port=port, tls_cert="/nowhere/cert", tls_key="/nowhere/key")
        with pytest.raises(ConfigError, match=r"\[gateway\] tls_cert"):
            check_before_start(TandemConfig(cluster=cluster, router=router, gateway=wrong), Console())
