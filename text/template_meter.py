"""The limits of a chat template: its CPU time, and the size of each value and of all values together.

    CPU      the steps of a template read the CPU clock of the thread
    memory   each step counts the characters and items of its result; steps that may turn small values into a large one
             are checked before they run

A step handles at most `MAX_VALUE_SIZE` characters, and only some steps read the clock. So a template may exceed its
time by a few steps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, MappingView
from contextvars import ContextVar
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

MAX_CPU_S = 1.0  # CPU time of one rendering; beyond: INVALID_ARGUMENT
MAX_VALUE_SIZE = 4_000_000  # characters of a text, items of a list in a template; beyond: INVALID_ARGUMENT
MAX_TOTAL_SIZE = 64_000_000  # results of all steps of one rendering; beyond: INVALID_ARGUMENT
MAX_NUMBER_BITS = 4096
_STEP_SIZE = 16  # counted for each step in addition to the size of its result
_CLOCK_INTERVAL = 512  # counted size between two reads of the clock
_VISITS_BETWEEN_CLOCK_READS = 4096
_CONTAINERS: Any = (list, tuple, dict, MappingView)
_SIZED: Any = (str, bytes, *_CONTAINERS)
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # "%9999d", "%*d", "{:{}}": a width that is large or comes from data


class TemplateLimit(SecurityError):
    """A template exceeds a limit of the sandbox."""


class Meter:
    """The CPU time and the size of results that one rendering has used."""

    def __init__(self) -> None:
        self._ends_at = time.thread_time() + MAX_CPU_S
        self._total = 0
        self._next_clock_read = 0

    def count(self, size: int) -> None:
        check_size(size)
        self._total += size + _STEP_SIZE
        if self._total > MAX_TOTAL_SIZE:
            raise TemplateLimit(f"it makes more than {MAX_TOTAL_SIZE} characters and items")
        if self._total >= self._next_clock_read:
            self._next_clock_read = self._total + _CLOCK_INTERVAL
            self.read_clock()

    def read_clock(self) -> None:
        if time.thread_time() > self._ends_at:
            raise TemplateLimit(f"it takes more than {MAX_CPU_S:g} s of CPU time")


meter: ContextVar[Meter] = ContextVar("meter")  # of the rendering on this thread


def check_size(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise TemplateLimit(f"it makes a value of more than {MAX_VALUE_SIZE} characters or items")


def counted(value: Any) -> Any:
    meter.get().count(_size(value))
    return value


def check_content(value: object) -> int:
    """At most the number of characters and items in a value, for a step that visits all of them: the text of the value,
    or a comparison. Raises `TemplateLimit` if it is too large.

    A list may have one large item many times, so this may be more than all that the template has made.
    """
    if isinstance(value, str):
        return len(value)
    size, num_visited, waiting = 0, 0, list[Any]([value])
    reader = meter.get(None)  # None: jinja computes a constant
    while waiting:
        item = waiting.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        size, num_visited = size + 1 + _size(item), num_visited + 1
        check_size(size)
        if reader is not None and num_visited % _VISITS_BETWEEN_CLOCK_READS == 0:
            reader.read_clock()
        if isinstance(item, dict):
            waiting += [part for pair in item.items() for part in pair]
        elif isinstance(item, _CONTAINERS):
            waiting += item
    return size


def check_operands(operator: str, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise TemplateLimit(f"it makes a number of more than {MAX_NUMBER_BITS} bits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                check_size(_size(value) * times)
    elif operator == "+":
        check_size(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else [right]
        check_format(left, values, left.count("%("))


def check_format(text: str, values: Iterable[object], num_named: int) -> None:
    """`num_named`: fields that name their value, so one value may be in the result many times."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimit("the width of a format must have at most three digits")
    sizes = [check_content(value) for value in values]
    check_size(len(text) + sum(sizes) + num_named * max(sizes, default=0))


def _size(value: object) -> int:
    return len(value) if isinstance(value, _SIZED) else 0
