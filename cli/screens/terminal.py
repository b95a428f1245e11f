"""The console of every command. Ids, names and errors come from clients and from other machines.

No text is markup, and no text reaches the terminal with a control character: an escape code in the id of a request
would be obeyed. What has a style is a `rich.text.Text`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from core.plain_text import escaped, is_plain
from runtime.line_writer import LineWriter

MIN_WIDTH = 40  # columns; a narrower terminal breaks the lines itself
SHOWN = "\n\t"  # control characters that an output may have


class Terminal(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False)
        if self.width < MIN_WIDTH:  # also COLUMNS=0, with which rich prints nothing
            self.width = MIN_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or is_plain(segment.text):  # the codes of rich itself are a segment of their own
                yield segment
            else:
                yield Segment(escaped(segment.text, SHOWN), segment.style)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """As it is: the terminal alone breaks it, and no part of it gets a colour of its own."""
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


@functools.cache
def notices() -> LineWriter:
    return LineWriter(sys.stdout)


def print_notice(line: str) -> None:
    """A line of a service, which goes on whatever takes its output."""
    notices().write(f"{escaped(line, SHOWN)}\n")


def print_answer(text: str) -> None:
    """A part of a model's answer: as it is into a file or a pipe, without control characters to a terminal."""
    print(escaped(text, SHOWN) if sys.stdout.isatty() else text, end="", flush=True)
