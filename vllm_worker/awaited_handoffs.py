"""The hand-offs of vLLM's own connector, and the Decode calls that wait for them.

A hand-off may arrive before its Decode call: two calls of a router can overtake each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from core.errors import InvalidRequest, QueueFull
from core.handoff import TransferId

MAX_EARLY_HANDOFFS = 1024  # hand-offs that wait for their Decode calls; beyond: `QueueFull`
EARLY_HANDOFF_S = 30.0  # a hand-off without its Decode call; beyond: forgotten


@dataclass(slots=True)
class AwaitedHandoffs:
    waiting: dict[TransferId, str] = field(default_factory=dict)  # request ids
    _early: OrderedDict[TransferId, tuple[bytes, float]] = field(default_factory=OrderedDict)  # with their time

    def refuse(self, transfer_id: TransferId | None) -> None:
        """Raises `InvalidRequest` if another call waits for the hand-off."""
        if transfer_id in self.waiting:
            raise InvalidRequest("transfer_id", "another call waits for this hand-off")

    def take(self, transfer_id: TransferId, request_id: str) -> bytes:
        """The hand-off of a new call; empty if the call has to wait."""
        handoff, _ = self._early.pop(transfer_id, (b"", 0.0))
        if not handoff:
            self.waiting[transfer_id] = request_id
        return handoff

    def arrive(self, transfer_id: TransferId, handoff: bytes, now: float) -> str | None:
        """The request that waits for it. Raises `QueueFull`."""
        request_id = self.waiting.pop(transfer_id, None)
        if request_id is None:
            if len(self._early) >= MAX_EARLY_HANDOFFS:
                raise QueueFull(f"{MAX_EARLY_HANDOFFS} hand-offs wait for their calls already")
            self._early[transfer_id] = (handoff, now)
        return request_id

    def forget_old(self, now: float) -> None:
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self._early.popitem(last=False)

    def next_deadline(self) -> float | None:
        return next(iter(self._early.values()))[1] + EARLY_HANDOFF_S if self._early else None

    def check(self) -> None:
        assert not self.waiting.keys() & self._early.keys()
        assert len(self._early) <= MAX_EARLY_HANDOFFS
