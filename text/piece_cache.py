"""The token ids of pieces of text (`text/pieces.py`), least recently used out first, bounded in bytes.

A key is a salt and the whole text of the piece, so a hit is exact. Requests with different salts share nothing: the
time of a call must not tell one client what another client sent.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict

# Limit: tokenized pieces, about 200 conversations of 32,000 tokens; beyond: the least recently used leaves
MAX_BYTES = 64 * 1024 * 1024
_ENTRY_BYTES = 700  # of an entry besides its text, salt and ids, measured as resident size

Key = tuple[str, str]  # salt, text


class PieceCache:
    """Not for several threads at the same time."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Key, array[int]] = OrderedDict()
        self.num_hits = 0
        self.num_misses = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: Key) -> array[int] | None:
        """The ids, which the caller must not change."""
        ids = self._entries.get(key)
        if ids is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return ids

    def put(self, key: Key, ids: array[int]) -> None:
        if key in self._entries:  # another thread was first
            return
        self._entries[key] = ids
        self._num_bytes += _size(key, ids)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._entries.popitem(last=False))

    def check(self) -> None:
        """Raises `AssertionError` if the count of bytes is wrong or over the bound."""
        assert self._num_bytes == sum(_size(key, ids) for key, ids in self._entries.items())
        assert self._num_bytes <= self._max_bytes


def _size(key: Key, ids: array[int]) -> int:
    salt, text = key
    return sys.getsizeof(salt) + sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES
