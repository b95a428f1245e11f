"""The documents say what is there: tables as drawn, links that lead somewhere, names and tests that exist."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from docs.render_tables import DRAWN, TABLES, Table, draw, render

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
WITH_CODE_NAMES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = (*PROJECT["tool"]["importlinter"]["root_packages"], "tests", "docs", "deploy")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"\.?[\w-]+(/[\w.-]*)+|[\w-]+\.(py|md|proto|toml|txt)")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


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


def test_a_document_that_lost_a_step_is_noticed() -> None:
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    step = "    OFFERED --> EXPIRED\n"
    assert step in text
    assert render(text.replace(step, ""), "protocol.md") == text


def test_a_metric_that_the_document_lost_is_noticed() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| `tandem_requests_total`"))
    assert render(text.replace(f"{row}\n", ""), "metrics.md") == text


@pytest.mark.parametrize("name", TABLES)
def test_a_step_without_an_explanation_is_refused(name: str) -> None:
    table = TABLES[name]
    forgotten = next(iter(table.causes))
    causes = {step: cause for step, cause in table.causes.items() if step != forgotten}
    with pytest.raises(ValueError, match="need an explanation"):
        draw(Table(table.document, table.steps, causes, table.starts))


@each_document
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    links = [match[1] for match in LINK.finditer(FENCED.sub("", path.read_text(encoding="utf-8")))]
    broken = [
        link
        for link in links
        if link and not link.startswith(("http://", "https://")) and not (path.parent / link).exists()
    ]
    assert not broken


@each_document
def test_every_file_named_in_backticks_is_there(path: Path) -> None:
    named = [span for span in spans(path) if FILE.fullmatch(span)]
    missing = [name for name in named if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert not missing


def test_the_architecture_names_many_files() -> None:
    assert len({span for span in spans(ROOT / "ARCHITECTURE.md") if FILE.fullmatch(span)}) > 40


@pytest.mark.parametrize("path", WITH_CODE_NAMES, ids=lambda path: path.name)
def test_every_name_in_backticks_is_a_name_of_the_code(path: Path) -> None:
    named = [span for span in spans(path) if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) and not FILE.fullmatch(span)]
    unknown = [span for span in named if not set(re.findall(r"\w+", span)) <= words_of_the_code()]
    assert not unknown


def test_every_fault_is_shown_by_tests_that_exist() -> None:
    lines = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and not line.startswith(("| fault |", "|--"))]
    assert len(rows) > 30
    for row in rows:
        files, names = re.findall(r"`(tests/[\w/]+\.py)`", row), re.findall(r"`(test_\w+)`", row)
        assert files, f"no file of tests in {row}"
        assert names, f"no test in {row}"
        defined = " ".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        assert not [name for name in names if f"def {name}(" not in defined], row
