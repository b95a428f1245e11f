"""`tandem doctor` shows its findings whole, and returns an exit code."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cli.diagnosis import doctor
from cli.diagnosis.doctor_findings import Finding, Health
from core.config import TandemConfig, from_mapping

LONG_PATH = "/home/[somebody]/" + "a-long-name/" * 9 + "model.gguf"


@pytest.mark.parametrize(("health", "code"), [(Health.OK, 0), (Health.WARN, 0), (Health.FAIL, 1)])
def test_a_narrow_terminal_shows_a_finding_whole(health: Health, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(_: TandemConfig) -> list[Finding]:
        return [Finding("model", health, LONG_PATH, "set [vllm] python")]

    monkeypatch.setattr(doctor, "examine", examine)
    console = Console(file=io.StringIO(), width=60)
    assert doctor.doctor(console, TandemConfig()) == code
    shown = "".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert LONG_PATH in shown
    assert "->set[vllm]python" in shown


def test_an_interpreter_of_vllm_that_is_missing_is_a_fault_only_of_a_config_that_needs_it() -> None:
    python = {"python": "/nowhere/bin/python"}
    (finding,) = doctor.vllm(from_mapping({"engine": {"name": "vllm"}, "vllm": python}))
    assert (finding.health, finding.text) == (Health.FAIL, "/nowhere/bin/python is not there")
    assert not list(doctor.vllm(from_mapping({"vllm": python})))


@pytest.mark.parametrize(("retries", "health"), [(15, Health.WARN), (5, Health.OK)])
def test_a_machine_whose_tcp_waits_for_a_quarter_of_an_hour_is_told_what_to_set(
    retries: int, health: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp_retries2").write_text(f"{retries}\n")
    monkeypatch.setattr("cli.diagnosis.doctor.TCP_RETRIES", tmp_path / "tcp_retries2")
    (finding,) = doctor.network()
    assert finding.health is health
    assert ("tcp_retries2=5" in finding.fix) == (health is Health.WARN)
