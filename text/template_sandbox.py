"""The sandbox of chat templates: limits their CPU time, their memory and their output.

The sandbox of jinja gives a template access to plain data only. This sandbox also meters each step of a template: a
loop turn, a call, an operator or a filter.

    CPU      the steps read the CPU clock of the thread
    memory   each step counts the characters and items of its result; steps that may turn small values into a large one
             (`*`, `**`, `%`, replace, join, format) are checked before they run, or are missing (center, ljust, ...)

A step handles at most `MAX_VALUE_SIZE` characters, and only some steps read the clock. So a template may exceed its
time by a few steps.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_CPU_S = 1.0  # of one rendering
MAX_VALUE_SIZE = 4_000_000  # characters of a text, items of a list
MAX_TOTAL_SIZE = 64_000_000  # of the results of all steps of one rendering
MAX_NUMBER_BITS = 4096
MAX_INDENT = 64
_STEP_SIZE = 16  # counted for each step in addition to the size of its result
_CLOCK_INTERVAL = 512  # counted size between two reads of the clock
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # "%9999d", "%*d", "{:{}}": a width that is large or comes from data

# Without the filters that widen a text or take more than linear time.
FILTERS = {
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse",
    "safe", "select", "selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper",
}  # fmt: skip
UNSAFE_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "format_map"}


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
            if time.thread_time() > self._ends_at:
                raise TemplateLimit(f"it takes more than {MAX_CPU_S:g} s of CPU time")


meter: ContextVar[Meter] = ContextVar("meter")  # of the rendering on this thread


def check_size(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise TemplateLimit(f"it makes a value of more than {MAX_VALUE_SIZE} characters or items")


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _counted(value: Any) -> Any:
    meter.get().count(_size(value))
    return value


def _metered(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)  # copies the attributes by which jinja selects the arguments
    def run(*args: Any, **kwargs: Any) -> Any:
        return _counted(function(*args, **kwargs))

    return run


# ---- steps that may turn small values into a large one


def _joined(parts: Iterable[object], separator: object = "", attribute: object = None) -> str:
    if attribute is not None:
        raise SecurityError("join does not accept attribute: use map(attribute=...) first")
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)) + len(str(separator)) * len(texts))
    return str(separator).join(texts)


def _replaced(text: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The tojson of jinja escapes HTML characters, which a prompt needs unchanged.
    if separators is not None and sum(map(len, separators)) > MAX_INDENT:
        raise TemplateLimit(f"the separators of tojson must have at most {MAX_INDENT} characters")
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise TemplateLimit(f"the indent of tojson must be in [0, {MAX_INDENT}], is {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_operands(operator: str, left: object, right: object) -> None:
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
    elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
        raise TemplateLimit("the width of a format must have at most three digits")


# ---- the environment


class _Metering(NodeTransformer):
    """Adds metering filters to steps without a hook in jinja: loops, `~`, and slices."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_turns")
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_counted")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _turns(_: Context, items: Iterable[object]) -> Iterator[object]:
    for item in items:
        meter.get().count(0)
        yield item


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote, for training. The text stays."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares the attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        # The optimizer of jinja would run steps of the template at compile time, without a meter.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False)
        own = {"join": _joined, "replace": _replaced, "tojson": _to_json, "_joined": _joined, "_counted": lambda v: v}
        kept = {name: function for name, function in self.filters.items() if name in FILTERS} | own
        self.filters = {name: _metered(function) for name, function in kept.items()} | {"_turns": _turns}
        self.tests = {name: _metered(function) for name, function in self.tests.items()}
        del self.globals["lipsum"]

    def metered(self, source: str) -> nodes.Template:
        parsed: nodes.Template = _Metering().visit(self.parse(source))
        return parsed

    def concat(self, parts: Iterable[str]) -> str:  # of macros and block assignments
        return str(_counted(_joined(parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _counted(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        unsafe = isinstance(obj, str | bytes) and attr in UNSAFE_METHODS
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(str(value.__self__)):
            raise TemplateLimit("the width of a format must have at most three digits")
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join"):
            bounded: Callable[..., str] = functools.partial(_replaced, owner)
            if name == "join":
                bounded = functools.partial(_joined, separator=owner)
            return _counted(bounded(*args, **kwargs))
        return _counted(super().call(__context, __obj, *args, **kwargs))
