"""What `tandem doctor` shows of its findings, and the exit code they make."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli import doctor
from cli.doctor import Finding, Health

LONG_PATH = "/home/somebody/" + "a-long-name/" * 9 + "model.gguf"


@pytest.mark.parametrize(("health", "code"), [(Health.OK, 0), (Health.WARN, 0), (Health.FAIL, 1)])
def test_a_finding_is_shown_whole_however_narrow_the_terminal_is(
    health: Health, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def examine() -> list[Finding]:
        return [Finding("model", health, LONG_PATH, "mend it")]

    monkeypatch.setattr(doctor, "examine", examine)
    console = Console(file=io.StringIO(), width=60)
    assert doctor.doctor(console) == code
    shown = "".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert LONG_PATH in shown
    assert "->mendit" in shown
