"""Every alert has its section in docs/runbook.md and points there; commands of the pages have no invented options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands_of_docs import check_command, commands_of
from tests.support.observability import rules

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "docs/runbook.md"
PAGES = [path for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/*.md") for path in ROOT.glob(pattern)]
ALERTS = {rule["alert"]: rule["annotations"] for rule in rules() if "alert" in rule}


def sections() -> dict[str, str]:
    _, *parts = re.split(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert list(sections()) == list(ALERTS), "in the order of the rules"


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_what_is_seen_what_to_check_and_what_to_do(alert: str) -> None:
    assert re.findall(r"^\*\*(\w+)\.\*\*", sections()[alert], re.MULTILINE) == ["Seen", "Check", "Do"]
    assert ALERTS[alert]["runbook"] == f"docs/runbook.md#{alert.lower()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_option_of_a_command_is_invented(page: Path) -> None:
    for command in map(shlex.split, commands_of(page)):
        if len(command) > 2:  # `tandem role` alone is a name
            check_command(command)


def test_the_runbook_uses_the_commands_that_operators_have() -> None:
    used = {command.split()[1] for command in commands_of(RUNBOOK)}
    assert used >= {"status", "events", "trace", "scale", "explain", "doctor"}


@pytest.mark.parametrize("command", ["tandem status --onces", "tandem scale --prefil 3", "ray start --blocks"])
def test_an_invented_option_is_found(command: str) -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command(command.split())
