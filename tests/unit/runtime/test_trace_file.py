"""A trace file that cannot be written is an error at the start: an exporter fails where nobody looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import TelemetryConfig
from core.errors import ConfigError
from runtime.telemetry import Telemetry


def test_a_trace_file_in_no_folder_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[telemetry\] trace_file: cannot write .*/no/spans.jsonl: No such file"):
        Telemetry(TelemetryConfig(trace_file=str(tmp_path / "no" / "spans.jsonl")), "tandem-test")


def test_a_trace_file_that_is_a_folder_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[telemetry\] trace_file: cannot write .*: Is a directory"):
        Telemetry(TelemetryConfig(trace_file=str(tmp_path)), "tandem-test")
