"""What every benchmark says: one line for each figure, its goal and whether it holds, and the same as JSON.

A line is printed when it is known and written with all others to build/bench/<name>.json. A goal that is missed is
printed as missed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

OUTPUT_DIR = Path("build/bench")


@dataclass(frozen=True, slots=True)
class Line:
    measure: str
    goal: str
    value: float
    unit: str
    peer: str = ""  # what the value is compared with
    ratio: float | None = None  # value / peer's value; where a smaller value is better, peer's value / value
    holds: bool | None = None  # None: there is no goal


class Report:
    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or Console()
        self.lines: list[Line] = []
        self.output = OUTPUT_DIR / f"{name}.json"

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        verdict = {None: "", True: "[green]holds[/]", False: "[red]MISSED[/]"}[line.holds]
        ratio = f"  {line.ratio:.3f} of {line.peer}" if line.ratio is not None else ""
        goal = f"  goal: {line.goal}" if line.goal else ""
        text = f"{line.measure:64s} {line.value:10.3f} {line.unit}{ratio}{goal}"
        self.console.print(f"{escape(text)}  {verdict}".rstrip(), highlight=False, soft_wrap=True)

    def write(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps([asdict(line) for line in self.lines], indent=1) + "\n")
        missed = sum(line.holds is False for line in self.lines)
        self.say(f"{len(self.lines)} lines in {self.output}, {missed} goals missed; {load()}")


def load() -> str:
    """What else this machine does: a figure that depends on it is worth little."""
    return f"load average {', '.join(f'{value:.2f}' for value in os.getloadavg())} on {os.cpu_count()} cores"
