"""Draws docs/limits.md from the comments of the limits in the code: `python -m docs.limits`.

A limit is a constant of a module, or an option in `core/config/`, whose comment says what is bounded, and what happens
beyond it. The comment stands behind the constant, or above it if the line would be too long:

    MAX_NOTES = 1000  # notes of the supervisor; beyond: the oldest is dropped

    # Limit: notes of the supervisor, which `tandem events` lists; beyond: the oldest is dropped
    MAX_NOTES = 1000

tests/unit/test_docs.py compares the page with the code.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from core.config import TandemConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/limits.md"
BEYOND = "; beyond: "
UNITS = {"_bytes_per_s": "B/s", "_bytes": "B", "_mb": "MB", "_ms": "ms", "_s": "s"}
BINARY = ((1 << 20, "MiB"), (1 << 10, "KiB"))
TABLES = {(get_args(hint) or (hint,))[0].__name__: name for name, hint in get_type_hints(TandemConfig).items()}
HEAD = """# Limits

What bounds each wait and each queue, its value, and what happens beyond it. Values of options are their defaults.
`python -m docs.limits` draws this page from the comments of the constants.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of the page. `name` is that of a constant, or `[table] option`."""

    module: str
    name: str
    value: float
    what: str
    beyond: str

    @property
    def unit(self) -> str:
        return next((unit for ending, unit in UNITS.items() if self.name.lower().endswith(ending)), "")

    def row(self) -> str:
        value, unit = self.value, self.unit
        if unit == "B":
            factor, unit = next((pair for pair in BINARY if value % pair[0] == 0), (1, unit))
            value /= factor
        return f"| {self.what} | {f'{value:,.10g} {unit}'.strip()} | {self.beyond} | `{self.name}` | `{self.module}` |"


def limits() -> Iterator[Limit]:
    """The limits of all packages, by module and line."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    for file in (file for package in packages for file in sorted((ROOT / package).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        if BEYOND in text:
            yield from _limits_of(str(file.relative_to(ROOT)), text)


def _limits_of(module: str, text: str) -> Iterator[Limit]:
    lines = text.splitlines()
    for owner in ast.parse(text).body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            what, beyond, then = _comment(lines, node.lineno - 1).partition(BEYOND)
            if beyond:
                name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                shown = f"[{TABLES[owner.name]}] {name}" if isinstance(owner, ast.ClassDef) else name
                yield Limit(module, shown, _value(node.value), what, then)


def _comment(lines: list[str], index: int) -> str:
    """The comment behind a line; without one, the comment above it from "Limit: " on."""
    behind = lines[index].partition("  # ")[2]
    if behind:
        return behind
    first = index
    while first and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(line.strip()[2:] for line in lines[first:index]).rpartition("Limit: ")[2]


def _value(node: ast.expr) -> float:
    """The number that an expression of numbers gives, in `option(...)` and `live(...)` that of the default."""
    default = node.args[0] if isinstance(node, ast.Call) else node
    return float(eval(ast.unparse(default), {"__builtins__": {}}))


def draw() -> str:
    deadlines: list[str] = []
    sizes: list[str] = []
    for limit in limits():
        (deadlines if limit.unit in ("s", "ms") else sizes).append(limit.row())
    columns = "| what | limit | beyond it | name | module |\n|---|---|---|---|---|"
    return "\n".join([HEAD, "## Waits", "", columns, *deadlines, "", "## Sizes and counts", "", columns, *sizes, ""])


if __name__ == "__main__":
    PAGE.write_text(draw(), encoding="utf-8")
