"""The documents say what is there: tables as drawn, links that lead somewhere, names and tests that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
import typer.main

import gateway.routes
from cli.main import app
from docs.limits import PAGE, draw
from docs.render_tables import DRAWN, render
from model_files.model_config import FAMILIES
from tests.support.commands_of_docs import check_command, commands_of
from tests.support.observability import rules
from tools.fuzz.parsers import PARSERS
from tools.fuzz.servers import BODIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/*.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
WITH_CODE_NAMES = [ROOT / "ARCHITECTURE.md", *(path for path in DOCUMENTS if path.parent.name in ("docs", "figures"))]
WITH_COMMANDS = [path for path in DOCUMENTS if path.parent.name not in ("figures", "adr")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = (*PROJECT["tool"]["importlinter"]["root_packages"], "tests", "tools", "docs", "deploy")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
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


def test_every_target_of_make_is_there_or_its_figures_name_the_commit_that_had_it() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.compile(r"(?:`|^)make ([a-z][a-z-]*)(?=(.{0,200}))", re.MULTILINE | re.DOTALL)
    found = [(path.name, match) for path in DOCUMENTS for match in named.finditer(path.read_text(encoding="utf-8"))]
    assert len(found) > 50
    gone = [(name, match) for name, match in found if match[1] not in targets]
    assert not [(name, match[0]) for name, match in gone if not re.search(r"\b[0-9a-f]{8}\b", match[2])]


def test_the_figures_of_the_readme_are_those_of_the_pages_behind_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [ROOT / "docs/performance.md", *(ROOT / "docs/figures").glob("*.md")]
    known = set(re.findall(NUMBER, "\n".join(page.read_text(encoding="utf-8") for page in pages)))
    rows = [line.split("|")[2:4] for line in readme.splitlines() if line.startswith("|") and "bench-" in line]
    assert len(rows) >= 4
    assert {number for row in rows for number in re.findall(NUMBER, "".join(row))} <= known
    assert f"knows {NUMBER_WORDS[len(FAMILIES)]} dense families" in readme.replace("\n", " ")


def test_the_page_of_usage_has_every_command() -> None:
    usage = (ROOT / "docs/usage.md").read_text(encoding="utf-8")
    assert not [name for name in typer.main.get_command(app).commands if f"tandem {name}" not in usage]  # type: ignore[attr-defined]


def test_every_endpoint_is_on_the_page_of_the_gateway_and_every_body_is_fuzzed() -> None:
    modules = [import_module(f"gateway.routes.{found.name}") for found in iter_modules(gateway.routes.__path__)]
    routes = [route for module in modules for route in getattr(module, "ROUTES", ())]
    assert len(routes) > 10
    page = (ROOT / "docs/gateway.md").read_text(encoding="utf-8")
    assert not [route.path for route in routes if route.path.partition("/{")[0] not in page]
    posted = {route.path for route in routes if "POST" in route.methods}
    assert posted == BODIES.keys() == posted & PARSERS.keys()


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


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
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
