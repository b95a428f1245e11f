"""The report of a benchmark: one line for each figure, with its peer, its floor and its goal where it has them.

`Report` prints each line as soon as the figure is known, and writes it at once: all lines so far are in
build/bench/<name>.json, and in build/bench/<name>.md as the table that docs/figures/ shows. A missed goal is
printed as missed. A section that fails becomes a row, and the sections after it run.

    Report       of a benchmark; benchmarks/gpu_sections has one for each section
    parser_of    the options that all benchmarks share: `--parts` and `--repeats`
    run_parts    runs the parts, each as a section
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OUTPUT_DIR = Path("build/bench")
FOLLOWING = ("ratio", "share_of_floor", "holds")  # from the fields of a line
DURATIONS = ("s", "ms", "us")
COLUMNS = ("measure", "value", "peer", "times the peer's speed", "share of the floor", "goal", "")


@dataclass(frozen=True, slots=True)
class Line:
    measure: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None  # in the same unit; None = the peer was not measured
    floor: float | None = None  # what the hardware allows, in the same unit
    least_ratio: float | None = None  # the goal, beside the peer
    least_share: float | None = None  # the goal, as a share of the floor
    most: float | None = None  # the goal, alone
    least: float | None = None  # likewise

    @property
    def ratio(self) -> float | None:
        """Our speed as a multiple of the peer's; above 1 is faster, for durations and for rates."""
        return None if self.peer_value is None else self._speed_beside(self.peer_value)

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor is None else self._speed_beside(self.floor)

    @property
    def goal(self) -> str:
        if self.least_ratio is not None:
            return f"at least {self.least_ratio:g} x {self.peer}"
        if self.least_share is not None:
            return f"at least {self.least_share:g} of the floor"
        if self.least is not None:
            return f"at least {self.least:,g} {self.unit}"
        return f"at most {self.most:g} {self.unit}" if self.most is not None else ""

    @property
    def holds(self) -> bool | None:
        """None where there is no goal, or no peer or floor to compare with."""
        if self.least_ratio is not None:
            return None if self.ratio is None else self.ratio >= self.least_ratio
        if self.least_share is not None:
            return None if self.share_of_floor is None else self.share_of_floor >= self.least_share
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def text(self) -> str:
        beside = f"  {number(self.ratio)} x {self.peer}" if self.ratio is not None else ""
        floor = f"  {number(self.share_of_floor)} of the floor" if self.floor is not None else ""
        goal = f"  goal: {self.goal}" if self.goal else ""
        verdict = {None: "", True: "  holds", False: "  MISSED"}[self.holds]
        return f"{self.measure:64s} {number(self.value):>8s} {self.unit}{beside}{floor}{goal}{verdict}"

    def _speed_beside(self, other: float) -> float:
        ours, theirs = (other, self.value) if self.unit in DURATIONS else (self.value, other)
        return ours / theirs if theirs else 0.0

    def row(self) -> list[str]:
        """One cell for each of `COLUMNS`."""
        peer = f"{self.peer}: {number(self.peer_value)}" if self.peer_value is not None else ""
        if self.peer and not peer:
            peer = f"{self.peer}: not measured"
        verdict = {None: "", True: "holds", False: "missed"}[self.holds]
        value = f"{number(self.value)} {self.unit}"
        return [self.measure, value, peer, number(self.ratio), number(self.share_of_floor), self.goal, verdict]


class Report:
    def __init__(self, name: str, folder: Path = OUTPUT_DIR, machine: str = "") -> None:
        """`machine`: where the lines come from; empty = this CPU. A high load average makes the figures worthless."""
        self.name = name
        self.lines: list[Line] = []
        self.failed: dict[str, str] = {}  # section -> why it has no more lines
        self._output = folder / f"{name}.json"
        self._texts: list[str] = []  # in Markdown, below the table of the lines
        self._circumstances = {
            "machine": machine or cpu_name(), "commit": commit_of(), "date": time.strftime("%Y-%m-%d"),
            "load average": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
        }  # fmt: skip

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.say(line.text())
        self.save()

    def add_table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Figures that are read across, as those of several systems at one rate."""
        self.add_text(table(columns, [list(map(str, row)) for row in rows]))

    def note(self, text: str) -> None:
        """A sentence below the figures: what was skipped, and why."""
        self.add_text(f"- {text}\n")

    def add_text(self, text: str) -> None:
        self._texts.append(text)
        self.say(f"\n{text}")
        self.save()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error in the block ends the block alone, and is a row of the report."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (reported)
            traceback.print_exc()
            self.failed[name] = " ".join(f"{type(error).__name__}: {error}".split())  # one row of a table
            self.say(f"{name:64s} FAILED: {self.failed[name]}")
            self.save()

    def write(self) -> None:
        """Print the summary. Raises `SystemExit` if a section failed."""
        self.save()
        missed = sum(line.holds is False for line in self.lines)
        self.say(f"{len(self.lines)} lines in {self._output} and {self.name}.md, {missed} goals missed")
        if self.failed:
            sys.exit(f"these sections failed: {', '.join(self.failed)}")

    def save(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        lines = [asdict(line) | {name: getattr(line, name) for name in FOLLOWING} for line in self.lines]
        content = self._circumstances | {"lines": lines, "texts": self._texts, "failed": self.failed}
        replace_file(self._output, json.dumps(content, indent=1) + "\n")
        failed = [[name, f"failed: {why}", *[""] * (len(COLUMNS) - 2)] for name, why in self.failed.items()]
        text = table(COLUMNS, [*(line.row() for line in self.lines), *failed])
        replace_file(self._output.with_suffix(".md"), "\n".join([text, *self._texts]).lstrip())


def replace_file(path: Path, text: str) -> None:
    """At once: a program that is killed leaves a whole file."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def parser_of(document: str | None, parts: Sequence[str] = (), repeats: int = 0) -> argparse.ArgumentParser:
    """`document`: the benchmark's own description. `repeats`: the default; 0 = it has none."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="measure only these")
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"of each measurement (default {repeats})")
    return parser


def run_parts(report: Report, parts: Mapping[str, Callable[[], None]], wanted: Sequence[str]) -> None:
    """Run the wanted parts in their order, each as a section, and end the report."""
    for name in wanted:
        with report.section(name):
            parts[name]()
    report.write()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without the columns that are empty in every row; empty without rows."""
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    lines = [columns, ["---"] * len(columns), *rows] if rows else []
    return "".join(f"| {' | '.join(line[index] for index in used)} |\n" for line in lines)


def number(value: float | None) -> str:
    """Counts in full, measures with four significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{cpu}, {os.cpu_count()} cores"


def commit_of() -> str:
    """The commit of this code, with "+" behind it if the tree has changes; "unknown" without git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
