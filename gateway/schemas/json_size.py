"""The work of reading a body, and the bound of its values, before it is parsed.

The parser and the schemas hold the interpreter lock: about 0.08 us for each number, 0.15 us for each text, 0.5 us for
each key, list or object. A thread does not help the loop there. So what is in a body is weighed first, in calls of a
millisecond: the heaviest body that is parsed holds the lock for about 50 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import refused
from runtime.validation_threads import MAX_INLINE_BYTES, MAX_SHORT_BYTES

# Limit: values in a body, where texts, keys and lists count more: half a million token ids; beyond: status 400
MAX_WEIGHT = 2**19
TEXT_WEIGHT, KEY_WEIGHT = 4, 8  # beside 1 for each value. Keys are texts, too; lists and objects weigh as keys
MAX_BARE_BYTES = 4 * 2**20  # bytes of a body outside of texts; beyond: status 400
# Limit: digits in a row outside of texts in a body over 64 KiB: n digits take n**2 steps; beyond: status 400
MAX_DIGITS = 64
SMALL_BYTES = 2**16  # of a body whose weight does not matter
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
    """Raises `ApiError`."""
    if len(body) > SMALL_BYTES:
        _check("body", count_values(body))


def check_texts(field: str, texts: Sequence[bytes]) -> None:
    """Bound the JSON texts that `field` has inside as a body. Raises `ApiError`."""
    if sum(map(len, texts)) > SMALL_BYTES:
        columns = zip(*map(count_values, texts), strict=True)
        _check(field, JsonSize(*map(sum, columns)))


def _check(field: str, size: JsonSize) -> None:
    if size.num_values + TEXT_WEIGHT * size.num_texts + KEY_WEIGHT * size.num_keys > MAX_WEIGHT:
        raise refused(
            field,
            f"must have at most {MAX_WEIGHT} values, where a text counts {1 + TEXT_WEIGHT} times, a list or an object "
            f"{1 + KEY_WEIGHT} times, and a key {TEXT_WEIGHT + KEY_WEIGHT} times more",
        )
    if size.num_bare > MAX_BARE_BYTES:
        raise refused(field, f"must have at most {MAX_BARE_BYTES} bytes outside of texts")
    if size.has_long_number:
        raise refused(field, f"must have at most {MAX_DIGITS} digits in a row outside of texts")


class JsonSize(NamedTuple):
    num_values: int  # an empty list counts one
    num_texts: int  # keys as well
    num_keys: int  # lists and objects as well
    num_bare: int  # bytes outside of texts
    has_long_number: int


DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def count_values(body: bytes) -> JsonSize:
    num_values, num_keys, num_quotes, num_bare, rest = 1, 0, 0, 0, b""
    zeros, has_long_number = b"", 0  # the end of the part before, which a number may continue
    for start in range(0, len(body), PART_BYTES):
        part = rest + body[start : start + PART_BYTES]
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        rest = b"\\" * (num_backslashes % 2)  # it escapes the first byte of the next part
        bare = part[: len(part) - num_backslashes].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_quotes += len(pieces) - 1
        num_bare += len(outside)
        num_values += outside.count(b",")
        num_keys += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        zeros = zeros[-MAX_DIGITS:] + outside.translate(DIGITS_TO_ZERO)
        has_long_number |= LONG_NUMBER in zeros
    return JsonSize(num_values, (num_quotes + 1) // 2, num_keys, num_bare, has_long_number)
