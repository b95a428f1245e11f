"""The requests that wait for a worker, in order of dispatch. Retries that pause are kept apart until their pause ends.

    priority   -->   streams that go on, by arrival   -->   tenants in turn, each by arrival

A tenant pays for a dispatch with the tokens of the prompt: the next dispatch is of the tenant that has paid least. A
tenant that starts to wait has paid as much as the tenant of the last dispatch, and not less than it paid before.

Each call takes O(log n) time, but `to_displace` looks at all requests of a full queue: thousands may wait while events
arrive at a high rate. A removed request leaves a stale entry in a heap, which the queue drops when the entry comes to
the top, or when most entries are stale.

A request that waits for a larger worker than others need steps aside. It still counts as queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from core.request import Request
from router.requests.routed_request import RoutedRequest

# (order of arrival, number, request), or (end of the pause, number, request). The number makes entries unique.
_Entry = tuple[float, int, RoutedRequest]


class _Turns:
    """The requests of one priority: the tenant that has paid least comes first."""

    def __init__(self) -> None:
        self._lines: dict[str, list[_Entry]] = {}  # by tenant, a heap
        self._order: list[tuple[float, int, str]] = []  # what each tenant of `_lines` has paid, a tie-break, the tenant
        self._paid = 0.0  # by the tenant of the last dispatch, when its turn came

    def push(self, entry: _Entry, tenant: str) -> None:
        line = self._lines.get(tenant)
        if line is None:
            self._lines[tenant] = [entry]
            heappush(self._order, (self._paid, entry[1], tenant))
        else:
            heappush(line, entry)

    def first(self, is_stale: Callable[[_Entry], bool]) -> RoutedRequest | None:
        while self._order:
            paid, _, tenant = self._order[0]
            line = self._lines[tenant]
            while line and is_stale(line[0]):
                heappop(line)
            if line:
                return line[0][2]
            heappop(self._order)  # all others have paid as much
            del self._lines[tenant]
            self._paid = paid
        return None

    def take_first(self) -> None:
        """Take what `first` has returned, and let its tenant pay."""
        self._paid, _, tenant = self._order[0]
        _, number, routed = heappop(self._lines[tenant])
        heapreplace(self._order, (self._paid + routed.request.num_prompt_tokens, number, tenant))

    def drop_stale(self, is_stale: Callable[[_Entry], bool]) -> None:
        """Drop stale entries, and tenants that have no request and owe nothing to others."""
        for tenant, line in self._lines.items():
            line = self._lines[tenant] = [entry for entry in line if not is_stale(entry)]
            heapify(line)
        self._order = [turn for turn in self._order if self._lines[turn[2]] or turn[0] > self._paid]
        heapify(self._order)
        self._lines = {tenant: self._lines[tenant] for _, _, tenant in self._order}

    def entries(self) -> Iterator[_Entry]:
        for line in self._lines.values():
            yield from line

    def check(self) -> None:
        assert sorted(tenant for _, _, tenant in self._order) == sorted(self._lines)
        assert all(paid >= self._paid for paid, _, _ in self._order)


class RequestQueue:
    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}  # by request id: the number of its newest entry
        self._num_waiting: Counter[tuple[int, str]] = Counter()  # by priority and tenant
        self._resumed: list[tuple[tuple[int, int], int, RoutedRequest]] = []  # by rank: streams that go on
        self._turns: dict[int, _Turns] = {}  # by priority
        self._paused: list[_Entry] = []
        self._aside: list[tuple[tuple[int, int], int, RoutedRequest]] = []  # by rank
        self._num_added = 0
        self._num_removed = 0  # since the last `_bound_heaps` that dropped stale entries

    def add(self, routed: RoutedRequest, now: float) -> None:
        """Add a request, which pauses until `not_before`."""
        assert routed.request_id not in self._number_of, f"{routed.request_id} is queued already"
        self._num_added += 1
        self._number_of[routed.request_id] = self._num_added
        self._num_waiting[_share_of(routed.request)] += 1
        if routed.not_before > now:
            heappush(self._paused, (routed.not_before, self._num_added, routed))
        else:
            self._make_ready(routed, self._num_added)

    def remove(self, routed: RoutedRequest) -> None:
        """Does nothing if the request is not queued. Its tenant does not pay for it."""
        if self._number_of.pop(routed.request_id, None) is not None:
            share = _share_of(routed.request)
            self._num_waiting[share] -= 1
            if not self._num_waiting[share]:
                del self._num_waiting[share]
            self._bound_heaps()

    def first(self, now: float) -> RoutedRequest | None:
        """The next request to dispatch; None if none waits, or all pause."""
        while self._paused and (self._paused[0][0] <= now or self._is_stale(self._paused[0])):
            entry = heappop(self._paused)
            if not self._is_stale(entry):
                self._make_ready(entry[2], entry[1])
        while self._resumed and self._is_stale(self._resumed[0]):
            heappop(self._resumed)
        first_resumed = self._resumed[0][2] if self._resumed else None
        for priority in sorted(self._turns):
            if first_resumed is not None and first_resumed.request.priority <= priority:
                return first_resumed
            routed = self._turns[priority].first(self._is_stale)
            if routed is not None:
                return routed
            del self._turns[priority]
        return first_resumed

    def take_first(self, now: float) -> None:
        """Take the request that `first` has returned. Its tenant pays for it."""
        self.remove(self._pass_first(now))

    def first_aside(self) -> RoutedRequest | None:
        """Of the requests that have stepped aside, the first one by rank. `remove` takes it."""
        while self._aside and self._is_stale(self._aside[0]):
            heappop(self._aside)
        return self._aside[0][2] if self._aside else None

    def step_aside(self, now: float) -> None:
        """Let all others pass the request that `first` has returned. Its tenant pays for it now."""
        routed = self._pass_first(now)
        heappush(self._aside, (routed.rank, self._number_of[routed.request_id], routed))

    def _pass_first(self, now: float) -> RoutedRequest:
        routed = self.first(now)
        assert routed is not None
        if routed.delivered:
            heappop(self._resumed)
        else:
            self._turns[routed.request.priority].take_first()
        return routed

    def num_ahead(self, request: Request) -> int:
        """Requests that are dispatched before one that arrives now, if prompts are of one length."""
        own = self._num_waiting[_share_of(request)]
        ahead = 0
        for (priority, _), count in self._num_waiting.items():
            if priority <= request.priority:
                ahead += count if priority < request.priority else min(count, own + 1)
        return ahead

    def to_displace(self, request: Request) -> RoutedRequest | None:
        """In a full queue: the newest request of the tenant with most requests, if `request` is of one with fewer.

        None if that tenant has no request without a token of the priority of `request`, or of a lower one.
        """
        count_of: Counter[str] = Counter()
        for (_, tenant), count in self._num_waiting.items():
            count_of[tenant] += count
        largest = max(count_of, key=count_of.__getitem__, default=request.tenant)
        if count_of[largest] <= count_of[request.tenant] + 1:
            return None
        found = (routed for routed in self if routed.request.tenant == largest and not routed.has_streamed)
        last = max(found, key=lambda routed: routed.rank, default=None)
        return None if last is None or last.request.priority < request.priority else last

    def _make_ready(self, routed: RoutedRequest, number: int) -> None:
        if routed.delivered:
            heappush(self._resumed, (routed.rank, number, routed))
            return
        turns = self._turns.setdefault(routed.request.priority, _Turns())
        turns.push((routed.arrival, number, routed), routed.request.tenant)

    def _is_stale(self, entry: tuple[object, int, RoutedRequest]) -> bool:
        return self._number_of.get(entry[2].request_id) != entry[1]

    def _bound_heaps(self) -> None:
        self._num_removed += 1
        if self._num_removed > len(self._number_of) + 64:
            self._num_removed = 0
            self._resumed = [entry for entry in self._resumed if not self._is_stale(entry)]
            self._paused = [entry for entry in self._paused if not self._is_stale(entry)]
            self._aside = [entry for entry in self._aside if not self._is_stale(entry)]
            heapify(self._resumed)
            heapify(self._paused)
            heapify(self._aside)
            for turns in self._turns.values():
                turns.drop_stale(self._is_stale)

    def __len__(self) -> int:
        return len(self._number_of)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """In no particular order."""
        entries = (
            *self._resumed,
            *self._paused,
            *self._aside,
            *(entry for turns in self._turns.values() for entry in turns.entries()),
        )
        return (entry[2] for entry in entries if not self._is_stale(entry))

    def check(self) -> None:
        assert sorted(routed.request_id for routed in self) == sorted(self._number_of)
        assert self._num_waiting == Counter(_share_of(routed.request) for routed in self)
        num_ready = sum(1 for turns in self._turns.values() for _ in turns.entries())
        assert len(self._resumed) + len(self._paused) + len(self._aside) + num_ready <= 2 * len(self._number_of) + 64
        for turns in self._turns.values():
            turns.check()


def _share_of(request: Request) -> tuple[int, str]:
    return (request.priority, request.tenant)
