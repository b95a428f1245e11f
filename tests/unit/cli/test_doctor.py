"""`tandem doctor` shows its findings whole, and returns an exit code."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli import doctor
from cli.findings import Finding, Health

LONG_PATH = "/home/somebody/" + "a-long-name/" * 9 + "model.gguf"


@pytest.mark.parametrize(("health", "code"), [(Health.OK, 0), (Health.WARN, 0), (Health.FAIL, 1)])
def test_a_narrow_terminal_shows_a_finding_whole(health: Health, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> list[Finding]:
        return [Finding("model", health, LONG_PATH, "fix it")]

    monkeypatch.setattr(doctor, "examine", examine)
    console = Console(file=io.StringIO(), width=60)
    assert doctor.doctor(console) == code
    shown = "".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert LONG_PATH in shown
    assert "->fixit" in shown
