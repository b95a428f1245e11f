"""What can be known to be wrong before anything starts is said before anything starts."""

from __future__ import annotations

import io
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.checks import (
    check_before_start,
    check_credentials,
    check_port,
    check_transport,
    tell_of_silent_collector,
)
from cli.serve import why_it_takes_long
from core.config import (
    ClusterConfig,
    EngineConfig,
    RouterConfig,
    SecurityConfig,
    TandemConfig,
    TelemetryConfig,
    TransferConfig,
)
from core.errors import ConfigError


def fake_config(**parts: EngineConfig | TelemetryConfig) -> TandemConfig:
    """Of a fleet that could start, but for these parts."""
    config = TandemConfig(engine=EngineConfig(model="fake:tiny"), router=RouterConfig(port=0))
    return replace(config, **parts)  # type: ignore[arg-type]


def test_a_transport_that_cannot_leave_a_process_is_refused() -> None:
    with pytest.raises(ConfigError, match='"memory" joins workers of one process only'):
        check_transport(TransferConfig(transport="memory"))
    check_transport(TransferConfig(transport="nixl"))


def test_a_taken_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .* --port"):
            check_port(RouterConfig(port=port))
    check_port(RouterConfig(port=0))


def test_a_taken_metrics_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics on port {port} .* --metrics-port"):
            check_before_start(fake_config(telemetry=TelemetryConfig(metrics_port=port)), Console())


def test_a_trace_file_that_cannot_be_written_is_named_with_its_option(tmp_path: Path) -> None:
    nowhere = TelemetryConfig(trace_file=str(tmp_path / "none" / "spans.jsonl"))
    with pytest.raises(ConfigError, match=r"\[telemetry\] trace_file: cannot write .*/none/spans.jsonl"):
        check_before_start(fake_config(telemetry=nowhere), Console())
    here = TelemetryConfig(trace_file=str(tmp_path / "spans.jsonl"))
    check_before_start(fake_config(telemetry=here), Console())


@pytest.mark.parametrize("model", ["fake:tiny", "random:llama-tiny"])
def test_more_context_than_the_model_has_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^max_context is 1000000, but "):
        check_before_start(fake_config(engine=EngineConfig(model=model, max_context=10**6)), Console())
    check_before_start(fake_config(engine=EngineConfig(model=model)), Console())


def test_an_address_that_is_not_of_this_machine_is_named_with_its_option() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:50051 .* --host"):
        check_port(RouterConfig(host="192.0.2.1"))


def test_credentials_that_cannot_be_read_are_named_with_their_option() -> None:
    with pytest.raises(ConfigError, match=r"\[security\] cluster_token_file: cannot read /no/token"):
        check_credentials(SecurityConfig(cluster_token_file="/no/token"))
    with pytest.raises(ConfigError, match=r"\[security\] tls_cert: cannot read /no/host.pem"):
        check_credentials(SecurityConfig(tls_cert="/no/host.pem", tls_key="/no/host.key", tls_ca="/no/ca.pem"))
    check_credentials(SecurityConfig())


@pytest.mark.parametrize(
    ("address", "says", "says_not"),
    [
        ("", "the logs are in /tmp/session/logs", "ray status"),
        (
            "10.0.0.1:6379",
            "free 'prefill' or 'decode' for each worker? `RAY_AUTH_MODE=token ray status --address 10.",
            "/tmp/session",
        ),
    ],
)
def test_a_start_that_takes_too_long_says_where_to_look(address: str, says: str, says_not: str) -> None:
    said = why_it_takes_long(ClusterConfig(address=address), "/tmp/session/logs")
    assert says in said
    assert says_not not in said


def test_a_collector_that_is_not_there_is_said_and_refuses_nothing() -> None:
    said = Console(file=io.StringIO())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        tell_of_silent_collector(TelemetryConfig(otlp_endpoint=endpoint), said)
    assert f"nothing answers at {endpoint} " in said.file.getvalue()  # type: ignore[attr-defined]


def test_a_collector_that_is_there_is_not_worth_a_word() -> None:
    said = Console(file=io.StringIO())
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        collector.listen()
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        tell_of_silent_collector(TelemetryConfig(otlp_endpoint=endpoint), said)
    tell_of_silent_collector(TelemetryConfig(), said)
    assert not said.file.getvalue()  # type: ignore[attr-defined]
