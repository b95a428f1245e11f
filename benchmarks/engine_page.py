"""Puts what a run of benchmarks/engine.py found into docs/performance.md, between two markers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine_figures import Cell
from benchmarks.report import Line

PAGE = Path("docs/performance.md")
BEGIN, END = "<!-- make bench-engine: begin -->\n", "<!-- make bench-engine: end -->\n"
VERDICTS = {True: "holds", False: "missed", None: ""}


def machine() -> str:
    """The CPU by its own name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unknown CPU")
    return f"{name}, {os.cpu_count()} cores"


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(how: str, cells: Sequence[Cell], lines: Sequence[Line]) -> str:
    cell_rows = [
        [
            cell.measure, f"{number(cell.value)} {cell.unit}",
            f"{cell.peer} {number(cell.theirs)}" if cell.theirs is not None else f"{cell.peer}: not measured",
            number(cell.speed), number(cell.share_of_floor), cell.goal, VERDICTS[cell.holds],
        ]
        for cell in cells
    ]  # fmt: skip
    line_rows = [
        [
            line.measure, f"{number(line.value)} {line.unit}",
            f"{number(line.ratio)} of {line.peer}" if line.ratio is not None else "",
            line.goal, VERDICTS[line.holds],
        ]
        for line in lines
    ]  # fmt: skip
    first = table(["measure", "Tandem", "peer", "speed, times the peer's", "share of the floor", "goal", ""], cell_rows)
    second = table(["measure", "value", "share", "goal", ""], line_rows)
    return f"{machine()}; {how}\n\n{first}\n{second}"


def write_page(content: str, page: Path = PAGE) -> None:
    """Raises `ValueError` where the page has lost its markers."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no section between {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}", encoding="utf-8")
