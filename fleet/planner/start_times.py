"""The time that workers take from the decision to start them until they serve, as seen in the slots of the fleet."""

from __future__ import annotations

from collections import deque

from core.fleet_control import FleetStatus, SlotState
from core.lifecycle import ServiceRole

REMEMBERED = 5  # newest starts
MOST_EXPECTED = 10.0  # times the expected time: a worker may wait for a machine for hours


class StartTimes:
    def __init__(self) -> None:
        self._begun: dict[str, float] = {}  # by slot: when its present start began
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, status: FleetStatus, now: float) -> None:
        seen = {slot.name: slot for slot in status.slots if slot.role is not ServiceRole.ROUTER}
        for name, slot in seen.items():
            if slot.state is SlotState.PLACING:
                self._begun[name] = now - slot.in_state_s
            elif slot.state is SlotState.STARTING:
                self._begun.setdefault(name, now - slot.in_state_s)
            elif name in self._begun:
                begun = self._begun.pop(name)
                if slot.state is SlotState.SERVING:
                    self._seconds.append(now - slot.in_state_s - begun)
        self._begun = {name: begun for name, begun in self._begun.items() if name in seen}

    def coming(self, status: FleetStatus, start_s: float, now: float) -> list[tuple[float, ServiceRole]]:
        """The seconds until each starting worker serves, and its role."""
        return [
            (max(0.0, self._begun[slot.name] + start_s - now), slot.role)
            for slot in status.slots
            if slot.name in self._begun
        ]

    def longest(self, expected_s: float) -> float:
        """Of the newest starts; the expected time if none has ended."""
        return min(max(self._seconds, default=expected_s), MOST_EXPECTED * expected_s)
