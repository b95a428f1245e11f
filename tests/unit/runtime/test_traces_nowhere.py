"""Traces that cannot be written or sent: said at the start, and nothing waits for them at the end."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from core.config import TelemetryConfig
from core.errors import ConfigError
from runtime.telemetry import Telemetry

EXPORTERS_OWN_PATIENCE_S = 10.0


def test_a_trace_file_in_no_folder_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[telemetry\] trace_file: cannot write .*/no/spans.jsonl: No such file"):
        Telemetry(TelemetryConfig(trace_file=str(tmp_path / "no" / "spans.jsonl")), "tandem-test")


def test_a_trace_file_that_is_a_folder_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[telemetry\] trace_file: cannot write .*: Is a directory"):
        Telemetry(TelemetryConfig(trace_file=str(tmp_path)), "tandem-test")


def test_a_collector_that_is_not_there_does_not_hold_up_the_end() -> None:
    with socket.socket() as silent:  # connects, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        telemetry = Telemetry(TelemetryConfig(otlp_endpoint=f"http://{host}:{port}"), "tandem-test")
        telemetry.end_root(telemetry.start_root({}, 0.0), 1.0, {})
        began = time.monotonic()
        telemetry.close()
        assert time.monotonic() - began < EXPORTERS_OWN_PATIENCE_S / 2
