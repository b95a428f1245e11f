"""Inputs that grow: the same nasty pieces, more or fewer of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

PIECES = (
    '"', '\\"', "\\", "\\\\", "[", "{", "]", "}", "(", ")", "/", "//", "|", "&", "#", ",", ":", ";", " ", "\n", "\r\n",
    "\t", "a", "1", "-", "e9", "0" * 300, "9" * 300, "ü", "\x00", "\u2028", "\U0001f600", "null", "[]", "{}", "a: ",
    '"a": 1, ',
    "<", "<tool_call>", "<tool_cal", "</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS", '[{"name": "f", "arguments": {',
    '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"a": "', '<tool_call>{"name": "f"}</tool_call>',
    "<|im_end|>", "<|im_start|>", "<|im_end", "stop", "sto", "a{1,9}", "(a|b)*", "[^a]", "\\d+", "%json {}", "start: ",
)  # fmt: skip
OPENINGS = (("[", "]"), ("{", "}"), ("(", ")"), ('{"a":', "}"), ('[{"a":', "}]"), ("(a|", ")"), ('{"items":', "}"),
            ('{"anyOf":[{},', "]}"), ('{"properties":{"a":', "}}"))  # fmt: skip
ITEMS = (
    "1",
    '"a"',
    "{}",
    "[]",
    "[[]]",
    '{"a":1}',
    "1.5",
    "null",
    "12345678",
    '"\\ud83d\\ude00"',
    '"\\""',
    "1e400",
    '["a"]',
)


class Grown(NamedTuple):
    what: str
    of: Callable[[int], Any]  # of about so many characters


def text(rng: random.Random) -> Grown:
    if rng.random() < 0.2:
        opening, closing = rng.choice(OPENINGS)
        end = rng.choice((closing, ""))  # or never closed
        width = len(opening + end)
        return Grown(f"{opening!r} * n + {end!r} * n",
                     lambda size: opening * (size // width) + end * (size // width))  # fmt: skip
    start, unit, end = ("".join(rng.choices(PIECES, k=rng.randint(*of))) for of in ((0, 2), (1, 3), (0, 2)))
    return Grown(f"{start!r} + {unit!r} * n + {end!r}", lambda size: start + unit * (size // len(unit)) + end)


def json_text(rng: random.Random, items: tuple[str, ...] = ITEMS) -> Grown:
    """JSON, mostly."""
    how, item, inner = rng.randrange(6), rng.choice(items), text(rng)
    if how == 0:
        return Grown(f"json of {inner.what}", lambda size: json.dumps(inner.of(size // 2), ensure_ascii=False))
    if how == 1:
        return Grown(f"list of {item}", lambda size: f"[{','.join([item] * (size // (len(item) + 1)))}]")
    if how == 2:
        key = json.dumps(rng.choice(PIECES))[1:-1]
        width = len(key) + len(item) + 10
        return Grown(
            f"{key}... to {item}",
            lambda size: "{" + ",".join(f'"{key}{at}":{item}' for at in range(size // width)) + "}",
        )
    if how == 3:
        opening, closing = rng.choice(OPENINGS)
        width = len(opening + closing)
        return Grown(f"{opening} deep", lambda size: opening * (size // width) + item + closing * (size // width))
    if how == 4:
        return Grown("a long number", lambda size: "7" * size)
    return inner


def json_around(good: Any, rng: random.Random) -> tuple[str, str, Any]:
    """`good` as JSON, before and behind a value at a place drawn from all of it, and the value."""
    root, mark = [copy.deepcopy(good)], "@the place@"
    place: Any = root
    key: Any = 0
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    value, place[key] = place[key], mark
    before, _, behind = json.dumps(root[0]).partition(f'"{mark}"')
    return before, behind, value


def json_inside(good: Any, rng: random.Random, items: tuple[str, ...] = ITEMS) -> Grown:
    """`good` with one value that grows, or with one item of a list many times."""
    if rng.random() < 0.3 and (lists := [key for key, value in good.items() if isinstance(value, list) and value]):
        key = rng.choice(lists)
        item = json.dumps(good[key][0])
        before, behind = json.dumps({**good, key: ["@"]}).split('"@"')
        return Grown(f"{item} many times in {key}",
                     lambda size: before + ",".join([item] * max(1, size // (len(item) + 1))) + behind)  # fmt: skip
    before, behind, old = json_around(good, rng)
    value = json_text(rng, items)
    if isinstance(old, str) and rng.random() < 0.7:
        inside = text(rng)
        value = Grown(f"json of {inside.what}", lambda size: json.dumps(inside.of(size // 2), ensure_ascii=False))
    return Grown(f"{before}({value.what}){behind}", lambda size: before + value.of(size) + behind)
