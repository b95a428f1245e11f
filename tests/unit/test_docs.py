"""The documents say what is there: tables as drawn, links that lead somewhere, names and tests that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from docs.limits import PAGE, draw
from docs.render_tables import DRAWN, render
from tests.support.commands_of_docs import check_command, commands_of
from tests.support.observability import rules

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/*.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
WITH_CODE_NAMES = [ROOT / "ARCHITECTURE.md", *(path for path in DOCUMENTS if path.parent.name in ("docs", "figures"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = (*PROJECT["tool"]["importlinter"]["root_packages"], "tests", "tools", "docs", "deploy")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"\.?[\w-]+(/[\w.-]*)+|[\w-]+\.(py|md|proto|toml|txt)")


def spans(path: Path) -> list[str]:
    """What stands in backticks, code blocks left out."""
    return SPAN.findall(FENCED.sub("", path.read_text(encoding="utf-8")))


@cache
def words_of_the_code() -> frozenset[str]:
    paths = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".proto", ".toml")]
    return frozenset(word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", sorted({document for document, _ in DRAWN.values()}))
def test_the_tables_in_the_documents_are_those_of_the_code(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    assert text == render(text, document), "run `python -m docs.render_tables`"


def test_the_page_of_limits_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == draw(), "run `python -m docs.limits`"


def test_every_relative_link_leads_somewhere() -> None:
    broken = [
        (path.name, match[1])
        for path in DOCUMENTS
        for match in LINK.finditer(FENCED.sub("", path.read_text(encoding="utf-8")))
        if match[1] and not match[1].startswith(("http://", "https://")) and not (path.parent / match[1]).exists()
    ]
    assert not broken


def test_every_file_named_in_backticks_is_there() -> None:
    named = [(path, span) for path in DOCUMENTS for span in spans(path) if FILE.fullmatch(span)]
    assert len(named) > 100
    assert not [
        (path.name, name) for path, name in named if not any((at / name).exists() for at in (ROOT, path.parent))
    ]


def test_every_name_in_backticks_is_a_name_of_the_code() -> None:
    unknown = [
        (path.name, span)
        for path in WITH_CODE_NAMES
        for span in spans(path)
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span)
        and not FILE.fullmatch(span)
        and not set(re.findall(r"\w+", span)) <= words_of_the_code()
    ]
    assert not unknown


def test_every_fault_names_a_file_of_its_tests() -> None:
    lines = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and not line.startswith(("| fault |", "|--"))]
    assert len(rows) > 30
    assert not [row for row in rows if not re.search(r"`tests/[\w/]+\.py`", row)]


def test_the_lock_file_of_the_examples_pins_every_module_and_names_no_registry() -> None:
    """npm takes them from wherever it is told to look."""
    node = ROOT / "examples/node"
    packages = json.loads((node / "package-lock.json").read_text())["packages"]
    wanted = json.loads((node / "package.json").read_text())["dependencies"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert all("resolved" not in package for package in packages.values())
    assert all("integrity" in package for name, package in packages.items() if name)


# ---- Every alert has its section in docs/runbook.md and points there; commands of the pages for operators have no
# invented options.

RUNBOOK = ROOT / "docs/runbook.md"
OF_OPERATORS = [RUNBOOK, *sorted((ROOT / "deploy").rglob("*.md"))]
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


@pytest.mark.parametrize("page", OF_OPERATORS, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_option_of_a_command_is_invented(page: Path) -> None:
    for command in commands_of(page):
        check_command(shlex.split(command))


def test_the_runbook_uses_the_commands_that_operators_have() -> None:
    used = {command.split()[1] for command in commands_of(RUNBOOK)}
    assert used >= {"status", "events", "trace", "scale", "explain", "doctor"}


@pytest.mark.parametrize("command", ["tandem status --onces", "tandem scale --prefil 3", "ray start --blocks"])
def test_an_invented_option_is_found(command: str) -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command(command.split())
