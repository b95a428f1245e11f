"""The requests that wait for a worker with room, and the decision which of them is dispatched next.

A request that found no room is priced again only after a change of room: events come by the thousand. The requests
behind it wait, too, so that none overtakes it. But where only workers have room whose whole pool is too small for it,
it steps aside: the others go on, and it is the first to be priced after the next change of room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from core.errors import InvalidRequest, QueueFull
from router.requests.admission import QueueWait, refusal
from router.requests.events import RequestArrived
from router.requests.request_queue import RequestQueue
from router.requests.routed_request import RoutedRequest
from router.routing.question import Candidate
from router.routing.workers import WorkerTable, hashes_of


class Taken(NamedTuple):
    """A request that has left the queue, with its workers. `refused` is the error that ends it instead."""

    routed: RoutedRequest
    candidate: Candidate
    refused: QueueFull | None


class DispatchQueue:
    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._queue = RequestQueue()
        self._blocked: RoutedRequest | None = None  # first in the queue; found no room before `workers.room_changed`
        self._blocked_aside: RoutedRequest | None = None  # likewise, first of those that have stepped aside
        self._room_at: float | None = None  # when the newest blocked request was priced again
        self._wait = QueueWait()

    def refuse_arrival(self, event: RequestArrived, now: float) -> None:
        """Raise `QueueFull` if the wait for room alone is too long."""
        if self._blocked is not None and not self._workers.room_changed:
            predicted_s = now - event.arrived_at + self._wait.seconds(self._queue.num_ahead(event.request))
            late = refusal(self._workers.config, predicted_s, event.deadline - event.arrived_at)
            if late is not None:
                raise late

    def displaced_by(self, event: RequestArrived, num_queued: int) -> tuple[RoutedRequest, QueueFull] | None:
        """The queued request that ends with this error so that this one may join a full queue; None if there is room.

        Raises `QueueFull` if its tenant has most requests, or it is below all of them in priority, and `InvalidRequest`
        if the queue and the workers can never hold what follows.
        """
        num_following, max_queued = event.num_following, self._workers.config.max_queued
        num_free, num_places = self._workers.places() if num_following else (0, 0)
        if num_following >= max_queued + num_places:
            room = f"workers take {num_places} at once, and max_queued is {max_queued}"
            raise InvalidRequest("prompt", f"too many: {num_following} choices follow this one, {room}")
        if num_queued < max_queued and num_queued + num_following < max_queued + num_free:
            return None
        follow = f", {num_following} follow this one" if num_following else ""
        full = QueueFull(f"{num_queued} requests are queued{follow}, and max_queued is {max_queued}")
        displaced = self._queue.to_displace(event.request)
        if displaced is None:
            raise full
        return (displaced, full) if num_queued >= max_queued else None

    def add(self, routed: RoutedRequest, now: float) -> None:
        routed.hashes, routed.queued_at = None, now
        self._queue.add(routed, now)

    def remove(self, routed: RoutedRequest) -> None:
        """Does nothing if the request is not queued."""
        self._queue.remove(routed)
        if self._blocked is routed:
            self._blocked = None
        if self._blocked_aside is routed:
            self._blocked_aside = None

    def take(self, now: float) -> Taken | None:
        """Take the first request that does not pause; None if no worker has room for it."""
        changed, self._workers.room_changed = self._workers.room_changed, False
        aside = self._queue.first_aside()
        if aside is not None and (changed or aside is not self._blocked_aside):
            candidate = self._price(aside, now)
            if candidate is not None:
                self._blocked = None
                return self._taken(aside, candidate, now)
            self._blocked_aside = aside
        while (routed := self._queue.first(now)) is not None and (changed or routed is not self._blocked):
            if routed is self._blocked:
                self._room_at = now
            self._blocked, candidate = None, self._price(routed, now)
            if candidate is not None:
                return self._taken(routed, candidate, now)
            assert routed.hashes is not None
            if not self._workers.has_room_for_shorter(routed.request, routed.hashes.num_tokens, now):
                self._blocked = routed
                return None
            self._queue.step_aside(now)
            self._blocked_aside = self._queue.first_aside()
        if not self._queue:
            self._wait.note_empty()
        return None

    def _price(self, routed: RoutedRequest, now: float) -> Candidate | None:
        routed.hashes = routed.hashes or hashes_of(routed.resumed())
        return self._workers.choose(
            routed.hashes, routed.failed_workers, now, (routed.preferred_worker, routed.request.num_prompt_tokens),
            max_total_tokens=routed.request.max_total_tokens, goes_on=bool(routed.delivered),
        )  # fmt: skip

    def _taken(self, routed: RoutedRequest, candidate: Candidate, now: float) -> Taken:
        refused = self._refusal(routed, candidate, now)
        if refused is not None or routed is self._queue.first_aside():
            self.remove(routed)
        else:
            self._queue.take_first(now)
        if refused is None and self._room_at == now:
            self._wait.note_dispatch(now)
        return Taken(routed, candidate, refused)

    def _refusal(self, routed: RoutedRequest, candidate: Candidate, now: float) -> QueueFull | None:
        if routed.has_streamed or not self._workers.has_fitted_cost(candidate):
            return None
        predicted_s = now - routed.arrived_at + candidate.first_token_s
        return refusal(self._workers.config, predicted_s, routed.deadline - routed.arrived_at)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """In no particular order."""
        return iter(self._queue)

    def check(self) -> None:
        self._queue.check()
        assert {self._blocked, self._blocked_aside} <= {None, *self._queue}
