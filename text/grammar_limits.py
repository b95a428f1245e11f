"""What a grammar may hold, so that llguidance reads it in about 100 ms on one core.

llguidance has limits of its own (text/compiled_grammars.py), and counts none of these: pairs of `patternProperties`,
patterns that one text must all match, multiples, objects inside constants, and rules that refer to each other. They are
counted in the parts of the grammar, also in a schema inside Lark inside JSON. Each check takes one pass over a grammar.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from text.schema_patterns import most_patterns

MAX_PATTERNS = 12  # that one text must all match: 12 take 3 ms, 16 take 85 ms, 20 take 3 s
MAX_NAME_PATTERN_PAIRS = 120  # of 16 `patternProperties`: up to 60 ms; of 32, 270 ms
MAX_MULTIPLE = 10_000  # the least common multiple of all `multipleOf`, without their decimal points: 55 ms
MAX_CONSTANT_PARTS = 500  # objects and lists inside `const` and `enum`: 50 ms
MAX_OPTIONAL = 150  # properties of one object; each adds four items to a row of the parser
MAX_RULES = 500  # rules, terminals and schemas in Lark: 30 ms; a chain of 3,000 takes 20 s

# Texts, expressions and comments, as llguidance reads Lark. It refuses one that is not closed.
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\])++/?|(?:#|//)[^\n]*+')
_RULE = re.compile(r"[\w\]]\s*+:")  # in JSON, a colon follows a text
_JSON = re.compile(r"%json\s*+")


def check_limits(grammar: str) -> None:
    """Raises `ValueError` that names the limit."""
    try:
        larks = _lark_parts(grammar)
        for lark in larks:
            bare = _LARK_TEXT.sub("", lark)
            joined = bare.count("&")
            _refuse_more(joined + 1 if joined else 0, MAX_PATTERNS, "regular expressions joined by &")
            _refuse_more(len(_RULE.findall(bare)) + lark.count("%json"), MAX_RULES, "rules, terminals and %json")
        counts = _Counts()
        for schema in _schemas(grammar, larks):
            counts.add(schema)
            what = "patterns and formats that one text must all match (allOf, $ref)"
            _refuse_more(most_patterns(schema, MAX_PATTERNS), MAX_PATTERNS, what)
    except RecursionError:
        raise ValueError("schemas must not be so deep") from None


def _refuse_more(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"at most {limit} {what}, here {count}")


def _parts(grammar: str) -> list[dict[str, Any]]:
    """llguidance refuses a grammar of which nothing is found."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        return [part for part in _list(json.loads(grammar).get("grammars")) if isinstance(part, dict)]
    except ValueError:
        return []


def _lark_parts(grammar: str) -> list[str]:
    return [lark for part in _parts(grammar) if isinstance(lark := part.get("lark_grammar"), str)]


def _schemas(grammar: str, larks: list[str]) -> Iterator[Any]:
    yield from (part["json_schema"] for part in _parts(grammar) if "json_schema" in part)
    for lark in larks:
        for found in _JSON.finditer(lark):
            with contextlib.suppress(ValueError):  # llguidance refuses it, or it stands in a comment
                yield json.JSONDecoder().raw_decode(lark, found.end())[0]


class _Counts:
    """Of all schemas of a grammar."""

    def __init__(self) -> None:
        self._pairs = self._constant_parts = 0
        self._multiple = 1

    def add(self, schema: Any) -> None:
        num_patterns = 0
        for each in _dicts(schema):
            num_patterns += len(_dict(each.get("patternProperties")))
            self._constant_parts += _num_parts(each.get("const")) + _num_parts(each.get("enum"))
            self._multiply(each.get("multipleOf"))
            optional = len(_dict(each.get("properties")).keys() - set(filter(_is_text, _list(each.get("required")))))
            _refuse_more(optional, MAX_OPTIONAL, "optional properties of one object")
        self._pairs += num_patterns * (num_patterns - 1) // 2
        _refuse_more(self._pairs, MAX_NAME_PATTERN_PAIRS, "pairs of patternProperties in a schema")
        _refuse_more(self._constant_parts, MAX_CONSTANT_PARTS, "objects and lists inside const and enum")

    def _multiply(self, number: Any) -> None:
        if not isinstance(number, int | float):
            return
        with contextlib.suppress(ValueError):  # llguidance refuses what is no number
            self._multiple = math.lcm(self._multiple, Fraction(str(number)).numerator or 1)
        if self._multiple > MAX_MULTIPLE:
            limit = f"the least common multiple of all multipleOf may be at most {MAX_MULTIPLE}, without decimal points"
            raise ValueError(f"{limit}; it is more with {str(number)[:40]}")


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else _list(value):
        if isinstance(child, dict | list):
            yield from _dicts(child)


def _num_parts(constant: Any) -> int:
    """Objects and lists, without the list of an `enum` itself."""
    children = constant.values() if isinstance(constant, dict) else _list(constant)
    return sum(1 + _num_parts(child) for child in children if isinstance(child, dict | list))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
