"""Makes odd messages of good ones: bytes, JSON values and messages of protobuf. Every choice is drawn from `rng`."""

from __future__ import annotations

import copy
import math
import random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1.7e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "a", "ü", "\x00", "\ud800", "\u2028", "[/x]", "a" * 300, "x\r\ny: z", "null", "stop", "user", "<|im_end|>")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e400,
    2**70,
    "",
    "a",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    ["a"] * 70,
)
MAX_ITEMS = 4
LATER_FIELDS = (b"\xf8\xf0\x04\x07", b"\xf8\xf0\x04\x00", b"\xfa\xf0\x04\x01a")  # 9999: a number, 0, a text

M = TypeVar("M", bound=Message)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """With some bytes changed, cut out, repeated or added."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randint(0, len(found)), rng.choice((1, 1, 2, 9, 40))
        how = rng.randrange(4)
        if how == 0:
            found[at : at + 1] = bytes((rng.randrange(256),))
        elif how == 1:
            del found[at : at + length]
        elif how == 2:
            found[at:at] = found[at : at + length]
        else:
            found[at:at] = rng.randbytes(length)
    return bytes(found)


def changed_json(value: Any, rng: random.Random) -> Any:
    """With one or two values, somewhere inside, replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 2)):
        place: Any = root
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            _change_item(place, key, rng)
            break
    return root[0] if root else None


def _change_item(place: Any, key: Any, rng: random.Random) -> None:
    how = rng.randrange(5)
    if how == 0 and isinstance(place, dict):
        del place[key]
    elif how == 1 and isinstance(place, dict):
        place[rng.choice(TEXTS)] = place[key]
    elif how == 2 and isinstance(place, list):
        place += [place[key]] * rng.choice((1, 20))
    else:
        place[key] = copy.deepcopy(rng.choice((*VALUES, *TEXTS, *NUMBERS)))


def changed_message(message: M, rng: random.Random) -> M:
    """A copy with some fields, at any depth, drawn again, or with a field of a later version."""
    found: Any = copy.deepcopy(message)
    for _ in range(rng.randint(1, 3)):
        place = found
        while True:
            inside = [value for field, value in place.ListFields() if _is_one_message(field)]
            if not inside or rng.random() < 0.4:
                break
            place = rng.choice(inside)
        if rng.random() < 0.1:
            place.MergeFromString(rng.choice(LATER_FIELDS))
        elif place.DESCRIPTOR.fields:
            _draw_field(place, rng.choice(place.DESCRIPTOR.fields), rng, depth=0)
    assert isinstance(found, type(message))
    return found


def drawn_message(descriptor: Any, rng: random.Random, depth: int = 0) -> Message:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < (0.5 if depth < 2 else 0.15):
            _draw_field(message, field, rng, depth)
    return message


def _is_one_message(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated


def _draw_field(message: Any, field: Any, rng: random.Random, depth: int) -> None:
    message.ClearField(field.name)
    if depth > 4 or rng.random() < 0.1:
        return
    target = getattr(message, field.name)
    if field.is_repeated:
        entries = field.message_type is not None and field.message_type.GetOptions().map_entry
        for _ in range(rng.randint(0, MAX_ITEMS)):
            if entries:
                key, value = field.message_type.fields
                if value.message_type is None:
                    target[_drawn(key, rng)] = _drawn(value, rng)
                else:
                    target[_drawn(key, rng)].CopyFrom(drawn_message(value.message_type, rng, depth + 1))
            elif field.message_type is not None:
                target.append(drawn_message(field.message_type, rng, depth + 1))
            else:
                target.append(_drawn(field, rng))
    elif field.message_type is not None:
        target.CopyFrom(drawn_message(field.message_type, rng, depth + 1))
        target.SetInParent()
    else:
        setattr(message, field.name, _drawn(field, rng))


def _drawn(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS).encode(errors="replace")
        return text if field.type == FieldDescriptor.TYPE_BYTES else text.decode()
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*range(6), 99))  # open enums: a later version may have further values
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    is_unsigned = kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
    least, most = (0, 2**bits - 1) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return max(least, min(rng.choice((*NUMBERS, rng.randrange(40))), most))
