"""The work of reading a body, and the bound of its values, before it is parsed.

The parser and the schemas hold the interpreter lock: about 0.1 us for each number, 0.3 us for each text, 1 us for each
key, list or object. A thread does not help the loop there. So the values are counted first, in calls of a millisecond.
"""

from __future__ import annotations

from gateway.errors import refused
from runtime.validation_threads import MAX_INLINE_BYTES, MAX_SHORT_BYTES

MAX_VALUES = 2**20  # values in a body: a million token ids; beyond: status 400
MAX_TEXTS = 2**17  # keys are texts, too
MAX_KEYS = 2**16  # keys, lists and objects in a body; beyond: status 400
MARK_BYTES = 4
PART_BYTES = 64 * 1024  # counted while the lock is held


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
    num_commas, num_others, num_quotes = 0, 0, 0
    for start in range(0, len(body), PART_BYTES):
        part = body[start : start + PART_BYTES]
        num_commas += part.count(b",")
        num_others += part.count(b":") + part.count(b"[") + part.count(b"{")
        num_quotes += part.count(b'"')
    if num_commas >= MAX_VALUES or num_others > MAX_KEYS or num_quotes > 2 * MAX_TEXTS:  # or the marks are in texts
        num_values, num_texts, num_keys = count_values(body)
        if num_values > MAX_VALUES:
            raise refused("body", f"must have at most {MAX_VALUES} values")
        if num_texts > MAX_TEXTS:
            raise refused("body", f"must have at most {MAX_TEXTS} keys and texts")
        if num_keys > MAX_KEYS:
            raise refused("body", f"must have at most {MAX_KEYS} keys, lists and objects")


def count_values(body: bytes) -> tuple[int, int, int]:
    """(values; keys and texts; keys, lists and objects). A list without items counts one value."""
    num_values, num_keys, num_quotes, rest = 1, 0, 0, b""
    for start in range(0, len(body), PART_BYTES):
        part = rest + body[start : start + PART_BYTES]
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        rest = b"\\" * (num_backslashes % 2)  # it escapes the first byte of the next part
        bare = part[: len(part) - num_backslashes].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_quotes += len(pieces) - 1
        num_values += outside.count(b",")
        num_keys += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
    return num_values, (num_quotes + 1) // 2, num_keys
