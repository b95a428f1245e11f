"""How many patterns one text must match at once, by a schema.

llguidance intersects these patterns when it reads a grammar: each pattern that overlaps with the others multiplies the
time by 2.7.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_PLACES = 500  # patterns in the values of one schema; beyond: INVALID_ARGUMENT
MAX_GENERAL = 100  # of these, inside items and other properties: each is compared with all
_ANY = "*"  # a step to all properties or items of a value

Place = tuple[str | int, ...]  # of a value in the output: names of properties and indexes of items
Patterns = Counter[Place]

_KEY = re.compile(r'"(pattern|format)"')


def most_patterns(schema: Any, enough: int) -> int:
    """The most patterns of one text; 0 where the whole schema has no more than `enough`. Raises `ValueError`."""
    text = json.dumps(schema)
    return _Reader(schema, text).most() if len(_KEY.findall(text)) > enough else 0


class _Reader:
    """Of one schema."""

    def __init__(self, schema: Any, text: str) -> None:
        self._root = schema
        self._has_names = '"$id"' in text  # which change what a $ref means
        self._num_all = len(_KEY.findall(text))
        self._known: dict[str, Patterns] = {}  # by $ref

    def most(self) -> int:
        """The most patterns of one place."""
        found = self._patterns(self._root)
        general = [place for place in found if _ANY in place]
        if len(general) > MAX_GENERAL:
            raise ValueError(f"patterns and formats of at most {MAX_GENERAL} values inside items")
        return max(
            (
                sum((found[other] for other in general if other != place and _overlap(place, other)), count)
                for place, count in found.items()
            ),
            default=0,
        )

    def _patterns(self, schema: Any) -> Patterns:
        """The patterns that must match at once, by place: all of `allOf` and `$ref`, and one of `anyOf`."""
        if not isinstance(schema, dict):
            return Counter()
        own = ("pattern" in schema) + ("format" in schema)
        found: Patterns = Counter({(): own} if own else {})  # every count is above 0
        if isinstance(target := schema.get("$ref"), str):
            found.update(self._patterns_of(target))
        for part in _list(schema.get("allOf")):
            found.update(self._patterns(part))
        for options in (schema.get("anyOf"), schema.get("oneOf")):
            most: Patterns = Counter()
            for option in map(self._patterns, _list(options)):
                most.update({place: count - most[place] for place, count in option.items() if count > most[place]})
            found.update(most)
        for step, child in _children(schema):
            found.update({(step, *place): count for place, count in self._patterns(child).items()})
        if len(found) > MAX_PLACES:
            raise ValueError(f"patterns and formats of at most {MAX_PLACES} values")
        return found

    def _patterns_of(self, target: str) -> Patterns:
        """Of a `$ref`. A schema inside itself adds nothing. One that is not found may be any: it counts as all."""
        if target not in self._known:
            self._known[target] = Counter()
            schema = self._resolve(target)
            self._known[target] = Counter({(): self._num_all}) if schema is None else self._patterns(schema)
        return self._known[target]

    def _resolve(self, target: str) -> Any:
        if self._has_names or (target != "#" and not target.startswith("#/")):
            return None
        found = self._root
        for step in unquote(target).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _children(schema: dict[str, Any]) -> Iterator[tuple[str | int, Any]]:
    """The schemas of properties and items, and the step to each."""
    properties, patterned = schema.get("properties"), schema.get("patternProperties")
    yield from properties.items() if isinstance(properties, dict) else ()
    yield from enumerate(_list(schema.get("prefixItems")))
    for general in (*(patterned.values() if isinstance(patterned, dict) else ()), schema.get("additionalProperties")):
        yield _ANY, general
    yield _ANY, schema.get("items")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _overlap(place: Place, other: Place) -> bool:
    return len(place) == len(other) and all(a == b or _ANY in (a, b) for a, b in zip(place, other, strict=True))
