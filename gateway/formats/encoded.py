"""Lists of an answer that are JSON before the answer is complete.

A log-probability takes about 80 bytes as JSON, and 700 as objects. And the loop never encodes all of them at once.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

PIECE_BYTES = 16 * 1024


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


class Encoded:
    """A list that takes its items encoded."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._last = bytearray()  # joins small items: an object for each token id would be ten times as large

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._last += b"," if self._last or self._pieces else b""
            self._last += json_bytes(items)[1:-1]
            if len(self._last) >= PIECE_BYTES:
                self._pieces.append(bytes(self._last))
                self._last.clear()

    def pieces(self) -> list[bytes]:
        return [b"[", *self._pieces, bytes(self._last), b"]"]


class EncodedValue:
    """A value that is JSON already."""

    def __init__(self, value: Any) -> None:
        self._json = json_bytes(value)

    def pieces(self) -> list[bytes]:
        return [self._json]


class EncodedItems:
    """A list of items that are JSON already."""

    def __init__(self, items: Sequence[bytes]) -> None:
        self._items = items

    def pieces(self) -> list[bytes]:
        return [b"[", b",".join(self._items), b"]"]


Part = Encoded | EncodedValue | EncodedItems


def json_pieces(value: Any) -> deque[bytes]:
    """`value`, which may hold a `Part` at any place, as JSON in pieces."""
    found: list[Part] = []
    mark = secrets.token_hex(16)  # no text of an answer has it

    def marked(part: Part) -> str:
        found.append(part)
        return mark

    text = json.dumps(value, default=marked, ensure_ascii=False, separators=(",", ":"))
    first, *others = text.encode("utf-8", "surrogatepass").split(f'"{mark}"'.encode())
    pieces = deque([first])
    for part, other in zip(found, others, strict=True):
        pieces.extend(part.pieces())
        pieces.append(other)
    return pieces
