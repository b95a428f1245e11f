"""The requests that wait for a worker, in rank order. Retries that pause are kept apart until their pause ends.

Each call takes O(log n) time: thousands of requests may wait while events arrive at a high rate. A removed request
leaves a stale entry in a heap, which the queue drops when the entry comes to the top, or when most entries are stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from router.requests.routed_request import RoutedRequest

# (rank, number, request), or (end of the pause, number, request). The number makes entries unique.
_Ready = tuple[tuple[int, int], int, RoutedRequest]
_Paused = tuple[float, int, RoutedRequest]


class RequestQueue:
    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}  # by request id: the number of its newest entry
        self._ready: list[_Ready] = []
        self._paused: list[_Paused] = []
        self._num_added = 0

    def add(self, routed: RoutedRequest, now: float) -> None:
        """Add a request, which pauses until `not_before`."""
        assert routed.request_id not in self._number_of, f"{routed.request_id} is queued already"
        self._num_added += 1
        self._number_of[routed.request_id] = self._num_added
        if routed.not_before > now:
            heappush(self._paused, (routed.not_before, self._num_added, routed))
        else:
            heappush(self._ready, (routed.rank, self._num_added, routed))

    def remove(self, routed: RoutedRequest) -> None:
        """Does nothing if the request is not queued."""
        if self._number_of.pop(routed.request_id, None) is not None:
            self._bound_heaps()

    def first(self, now: float) -> RoutedRequest | None:
        """The request of the highest rank that does not pause."""
        while self._paused and (self._paused[0][0] <= now or self._is_stale(self._paused[0])):
            entry = heappop(self._paused)
            if not self._is_stale(entry):
                heappush(self._ready, (entry[2].rank, entry[1], entry[2]))
        while self._ready and self._is_stale(self._ready[0]):
            heappop(self._ready)
        return self._ready[0][2] if self._ready else None

    def _is_stale(self, entry: _Ready | _Paused) -> bool:
        return self._number_of.get(entry[2].request_id) != entry[1]

    def _bound_heaps(self) -> None:
        if len(self._ready) + len(self._paused) > 2 * len(self._number_of) + 64:
            self._ready = [entry for entry in self._ready if not self._is_stale(entry)]
            self._paused = [entry for entry in self._paused if not self._is_stale(entry)]
            heapify(self._ready)
            heapify(self._paused)

    def __len__(self) -> int:
        return len(self._number_of)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """In no particular order."""
        entries: list[_Ready | _Paused] = [*self._ready, *self._paused]
        return (entry[2] for entry in entries if not self._is_stale(entry))

    def check(self) -> None:
        assert sorted(routed.request_id for routed in self) == sorted(self._number_of)
        assert len(self._ready) + len(self._paused) <= 2 * len(self._number_of) + 64
