"""The cache of tokenized pieces is bounded in bytes, and forgets the least recently used piece first."""

from __future__ import annotations

import sys
from array import array

from text.piece_cache import PieceCache


def ids(count: int) -> array[int]:
    return array("I", range(count))


def test_a_piece_is_found_under_its_own_salt_only() -> None:
    cache = PieceCache()
    cache.put(("a", "text"), ids(3))
    assert cache.get(("a", "text")) == ids(3)
    assert cache.get(("", "text")) is None
    assert cache.get(("a", "text ")) is None
    assert (cache.num_hits, cache.num_misses) == (1, 2)


def test_the_least_recently_used_piece_leaves_when_the_bytes_are_used_up() -> None:
    sizing = PieceCache()
    sizing.put(("", "1"), ids(100))
    cache = PieceCache(max_bytes=2 * sizing.num_bytes)
    cache.put(("", "1"), ids(100))
    cache.put(("", "2"), ids(100))
    assert cache.get(("", "1")) is not None
    cache.put(("", "3"), ids(100))
    assert [cache.get(("", text)) is not None for text in "123"] == [True, False, True]
    cache.check()


def test_a_piece_larger_than_the_cache_is_not_kept() -> None:
    cache = PieceCache(max_bytes=1000)
    cache.put(("", "a" * 2000), ids(1))
    assert cache.get(("", "a" * 2000)) is None
    assert cache.num_bytes == 0
    cache.check()


def test_a_piece_that_is_put_twice_counts_once() -> None:
    cache = PieceCache()
    cache.put(("", "text"), ids(3))
    before = cache.num_bytes
    cache.put(("", "text"), ids(3))
    assert cache.num_bytes == before
    cache.check()


def test_the_counted_bytes_cover_the_objects_of_an_entry() -> None:
    cache, text = PieceCache(), "é" * 600
    cache.put(("salt", text), ids(400))
    assert cache.num_bytes >= sys.getsizeof(("salt", text)) + sys.getsizeof(text) + 400 * 4
