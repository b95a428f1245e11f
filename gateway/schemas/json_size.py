"""The bound of the values in a body, before it is parsed.

The parser and the schemas hold the interpreter lock: about 0.1 us for each number or text, 1 us for each key, list or
object. A thread does not help the loop there. So the values are counted first, in calls of microseconds.
"""

from __future__ import annotations

import re

from gateway.errors import refused

MAX_VALUES = 2**20  # a million token ids
MAX_KEYS = 2**16  # keys, lists and objects
PART_BYTES = 64 * 1024  # counted while the lock is held

_TEXT_OR_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,:\[{]', re.DOTALL)


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
