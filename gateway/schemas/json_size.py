"""The work of reading a body, and the bound of its values, before it is parsed.

The parser and the schemas hold the interpreter lock: about 0.1 us for each number or text, 1 us for each key, list or
object. A thread does not help the loop there. So the values are counted first, in calls of microseconds.
"""

from __future__ import annotations

import re

from gateway.errors import refused
from runtime.validation_threads import MAX_INLINE_BYTES, MAX_SHORT_BYTES

MAX_VALUES = 2**20  # a million token ids
MAX_KEYS = 2**16  # keys, lists and objects
MARK_BYTES = 4
PART_BYTES = 64 * 1024  # counted while the lock is held

_TEXT_OR_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,:\[{]', re.DOTALL)


def work_of(body: bytes) -> int:
    """The size of reading `body` for `ValidationThreads`: its marks count, and text hardly.

    So bodies of at most 16 KB with few parts stay on the loop, for less than half a millisecond. A thread costs more.
    """
    if len(body) > MAX_SHORT_BYTES:
        return len(body)
    num_marks = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    return len(body) * MAX_INLINE_BYTES // MAX_SHORT_BYTES + MARK_BYTES * num_marks


def check_size(body: bytes) -> None:
    """Raises `ApiError`. Every value but the first follows one of four marks."""
    if len(body) <= MAX_KEYS:
        return
    num_commas, num_others = 0, 0
    for start in range(0, len(body), PART_BYTES):
        part = body[start : start + PART_BYTES]
        num_commas += part.count(b",")
        num_others += part.count(b":") + part.count(b"[") + part.count(b"{")
    if num_commas >= MAX_VALUES or num_others > MAX_KEYS:  # or the marks are in texts
        _check_outside_of_texts(body)


def _check_outside_of_texts(body: bytes) -> None:
    num_values, num_keys = 1, 0
    for found in _TEXT_OR_MARK.finditer(body):
        match body[found.start()]:
            case 0x2C:  # a comma
                num_values += 1
            case 0x22:  # a text
                pass
            case _:
                num_keys += 1
        if num_values > MAX_VALUES:
            raise refused("body", f"must have at most {MAX_VALUES} values")
        if num_keys > MAX_KEYS:
            raise refused("body", f"must have at most {MAX_KEYS} keys, lists and objects")
