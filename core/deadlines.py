"""The deadlines of a machine, from which it answers `next_deadline()`."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline per key. `expire` returns keys in the order of their deadlines."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0  # orders equal deadlines, as keys need not be comparable

    def set(self, key: K, when: float) -> None:
        if self._when.get(key) == when:
            return  # a second entry would not be stale
        self._when[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))
        self._bound_heap()

    def when(self, key: K) -> float:
        """Raises `KeyError` for a key without a deadline."""
        return self._when[key]

    def cancel(self, key: K) -> None:
        self._when.pop(key, None)
        self._bound_heap()

    def _bound_heap(self) -> None:
        """Rebuild the heap when most of its entries are stale: of deadlines that were moved or cancelled."""
        if len(self._heap) > 2 * len(self._when) + 64:
            self._heap = [entry for entry in self._heap if self._when.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> list[K]:
        """Remove and return the keys with a deadline at or before `now`."""
        expired: list[K] = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            expired.append(key)
        return expired

    def __len__(self) -> int:
        return len(self._when)

    def _drop_stale(self) -> None:
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
