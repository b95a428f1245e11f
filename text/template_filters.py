"""The filters of chat templates: those of jinja, bounded (`text/template_meter.py`).

Left out are random, and filters for pages (xmlattr, urlize, striptags, wordwrap, center): they widen a text or take
more than linear time, and prompts have no use for them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Environment, filters, pass_environment, tests
from jinja2.exceptions import FilterArgumentError

from text.template_meter import TemplateLimit, check_content, check_operands, check_size, counted

MAX_INDENT = 64
MAX_PRECISION = 64
MAX_PRETTY_SIZE = 100_000  # of a value that pprint shows, which takes more than linear time

_OF_JINJA = {
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat", "first",
    "float", "forceescape", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique",
    "upper", "urlencode", "wordcount",
}  # fmt: skip
# Of these, and of the tests, those that visit all of a value: they write or compare it.
_VISITING = {
    "capitalize", "dictsort", "e", "escape", "forceescape", "groupby", "lower", "max", "min", "safe", "sort", "string",
    "title", "trim", "unique", "upper", "urlencode", "wordcount",
}  # fmt: skip
_VISITING_TESTS = {
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt",
    "ne", "upper",
}  # fmt: skip


def joined(parts: Iterable[object], separator: object = "") -> str:
    check_content(separator)
    size, texts, between = 0, [], str(separator)
    for part in parts:
        size += check_content(part) + len(between)
        check_size(size)
        texts.append(str(part))
    return between.join(texts)


def replaced(s: object, old: object, new: object, count: int | None = None) -> str:
    for value in (s, old, new):
        check_content(value)
    text, old, new = str(s), str(old), str(new)
    check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(environment: Environment, value: Iterable[object], d: object = "", attribute: str | int | None = None) -> str:
    return joined(_attributes(environment, value, attribute), d)


@pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> object:
    total = start
    for item in _attributes(environment, iterable, attribute):
        check_operands("+", total, item)
        total = counted(total + item)
    return total


def _attributes(environment: Environment, items: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
    return items if attribute is None else map(filters.make_attrgetter(environment, attribute), items)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_size(len(s) + (len(s.splitlines()) + 1) * (len(width) if isinstance(width, str) else width))
    return filters.do_indent(s, width, first, blank)


def _format(value: object, *args: object, **kwargs: object) -> str:
    if args and kwargs:
        raise FilterArgumentError("format takes values by place or by name, not both")
    check_content(value)
    text, values = str(value), kwargs or args
    check_operands("%", text, values)
    return text % values


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_PRECISION:
        raise TemplateLimit(f"the precision of round must be in [-{MAX_PRECISION}, {MAX_PRECISION}], is {precision}")
    return filters.do_round(value, precision, method)


def _batch(value: Iterable[object], linecount: int, fill_with: object = None) -> Iterator[list[object]]:
    check_size(linecount)  # the last row is filled up to it
    yield from map(counted, filters.do_batch(value, linecount, fill_with))


def _slice(value: Iterable[object], slices: int, fill_with: object = None) -> Iterator[list[object]]:
    yield from map(counted, filters.sync_do_slice(value, slices, fill_with))  # type: ignore[arg-type]


def _pretty(value: object) -> str:
    if check_content(value) > MAX_PRETTY_SIZE:
        raise TemplateLimit(f"pprint takes a value of at most {MAX_PRETTY_SIZE} characters and items")
    return filters.do_pprint(value)


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
    check_content(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # The indents of a value that is deep and long are much larger than the value.
    return encoder.encode(value) if indent is None else joined(map(counted, encoder.iterencode(value)))


_OWN = {
    "batch": _batch, "format": _format, "indent": _indent, "join": _join, "pprint": _pretty, "replace": replaced,
    "round": _round, "slice": _slice, "sum": _sum, "tojson": _to_json,
}  # fmt: skip


def metered(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)  # copies the attributes by which jinja selects the arguments
    def run(*args: Any, **kwargs: Any) -> Any:
        return counted(function(*args, **kwargs))

    return run


def _visiting(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            check_content(value)
        return function(*args, **kwargs)

    return run


def bounded_filters() -> dict[str, Any]:
    of_jinja = {name: function for name, function in filters.FILTERS.items() if name in _OF_JINJA}
    visiting = {name: _visiting(of_jinja[name]) for name in _VISITING}
    return {name: metered(function) for name, function in (of_jinja | visiting | _OWN).items()}


def bounded_tests() -> dict[str, Any]:
    visiting = {name: _visiting(tests.TESTS[name]) for name in _VISITING_TESTS}
    return {name: metered(function) for name, function in (tests.TESTS | visiting).items()}
