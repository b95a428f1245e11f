"""What a shell may read of the machine: the queue, the retries and the workers. Nothing here changes the machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sized

from core.errors import ErrorCode
from core.lifecycle import ServiceRole
from core.request import Request
from router.requests.moves import MOVED, MoveOutcome
from router.routing.question import Candidate
from router.routing.worker_record import WorkerRecord
from router.routing.workers import WorkerTable, hashes_of


class RouterView:
    def __init__(
        self,
        requests: Collection[str],
        dispatches: Sized,
        workers: WorkerTable,
        num_retries: Mapping[ErrorCode, int],
        moves: Mapping[MoveOutcome, int],
    ) -> None:
        self._requests = requests
        self._dispatches = dispatches
        self._workers = workers
        self._num_retries = num_retries
        self._moves = moves
        self.begins_with_prefill = False  # prefill workers start with the fleet, and they alone should compute prompts

    @property
    def num_queued(self) -> int:
        """Requests without a dispatch, including choices that wait for the first one."""
        return len(self._requests) - len(self._dispatches)

    @property
    def num_in_flight(self) -> int:
        return len(self._dispatches)

    def num_retries(self) -> dict[ErrorCode, int]:
        """By the error of the attempt that failed."""
        return dict(self._num_retries)

    def num_moves(self) -> dict[MoveOutcome, int]:
        """Moves that have ended or found no room, by reason and outcome."""
        return dict(self._moves)

    @property
    def num_moved(self) -> int:
        """Running sequences that have moved."""
        return sum(count for (_, outcome), count in self._moves.items() if outcome == MOVED)

    def worker(self, worker_id: str) -> WorkerRecord | None:
        """None if the worker has not joined, or was lost."""
        return self._workers.get(worker_id)

    def workers(self) -> Iterator[WorkerRecord]:
        return iter(self._workers)

    @property
    def can_decode(self) -> bool:
        """A decode worker serves."""
        return self._workers.served_until == math.inf

    @property
    def start_s(self) -> float:
        """Of the worker that the planner brings when a request waits; 0 = none comes."""
        return self._workers.start_s

    @property
    def can_serve(self) -> bool:
        """A decode worker serves, or comes when a request waits."""
        return self.can_decode or self.start_s > 0.0

    @property
    def awaits_prefill(self) -> bool:
        """No prefill worker has served yet, and decode workers should compute no prompts."""
        return self.begins_with_prefill and not self._workers.had_prefill

    @property
    def can_prefill(self) -> bool:
        """A prefill worker serves."""
        return self._workers.has_role(ServiceRole.PREFILL)

    @property
    def decode_limits(self) -> tuple[int, ...]:
        """Most tokens of prompt and output that the serving decode workers hold, each number once, rising."""
        return self._workers.decode_limits

    def find_candidates(self, request: Request, now: float) -> list[Candidate]:
        """The workers that could take `request` now, cheapest first."""
        return self._workers.candidates(hashes_of(request), frozenset(), now, request.max_total_tokens)
