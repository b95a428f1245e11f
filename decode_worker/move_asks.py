"""The requests of a decode worker for moves: which calls it has asked for, and when it may ask for them again.

If the router finds no worker with room, it does not answer. The worker then asks for others, or again.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from core.lifecycle import MoveReason
from decode_worker.events import AskToMove

MAX_MOVES = 4  # at once: more copies would share the path, and each would catch up later
ASK_AGAIN_S = 0.5
ROOM_WAIT_S = 5.0  # of a move for its WANT: another worker may have room sooner
MIN_TOKENS_LEFT = 4  # a sequence with fewer tokens to come ends before it could have moved


class MoveAsks:
    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}  # of open calls, by request id
        self._ask_again_at: float | None = None

    def ask(self, movable: Iterable[str], num_moving: int, reason: MoveReason, now: float) -> list[AskToMove]:
        """Ask for moves of some of these calls. Those whose last request is oldest come first."""
        candidates = sorted(filter(lambda name: self.may_ask(name, now), movable), key=self._last_asked)
        asked = tuple(candidates[: max(0, MAX_MOVES - num_moving - self._num_waiting(now))])
        self._asked_at |= dict.fromkeys(asked, now)
        return [AskToMove(asked, reason)] if asked else []

    def ask_to_leave(self, movable: Iterable[str], num_moving: int, now: float) -> list[AskToMove]:
        """As `ask`, for a worker that drains. Call it after each event."""
        asked = self.ask(movable, num_moving, MoveReason.DRAIN, now)
        waiting = [at for at in self._asked_at.values() if now < at + ASK_AGAIN_S]
        self._ask_again_at = min(waiting) + ASK_AGAIN_S if waiting else None
        return asked

    def may_ask(self, request_id: str, now: float) -> bool:
        asked_at = self._asked_at.get(request_id)
        return asked_at is None or now >= asked_at + ASK_AGAIN_S

    def note_ended(self, request_id: str, now: float) -> None:
        """A move has ended without a result."""
        self._asked_at[request_id] = now

    def forget(self, request_id: str) -> None:
        """The call has ended."""
        self._asked_at.pop(request_id, None)

    def next_deadline(self) -> float | None:
        return self._ask_again_at

    @property
    def asked(self) -> Set[str]:
        """The calls that it has asked for, or that have stayed after a move."""
        return self._asked_at.keys()

    def _last_asked(self, request_id: str) -> float:
        return self._asked_at.get(request_id, 0.0)

    def _num_waiting(self, now: float) -> int:
        return sum(now < at + ASK_AGAIN_S for at in self._asked_at.values())
