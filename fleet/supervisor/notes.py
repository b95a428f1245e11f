"""The newest notes about the fleet, with their numbers and times."""

from __future__ import annotations

from collections import deque
from itertools import islice

from core.fleet_control import FleetNote
from fleet.law.events import FleetMessage

MAX_NOTES = 1000  # notes of the supervisor, for `tandem events`; beyond: the oldest is dropped


class NoteRing:
    def __init__(self) -> None:
        self._notes: deque[FleetNote] = deque(maxlen=MAX_NOTES)
        self._num_added = 0

    def add(self, message: FleetMessage, at_unix_s: float) -> None:
        self._num_added += 1
        self._notes.append(FleetNote(self._num_added, at_unix_s, message.subject, message.what, message.reason))

    def newest(self, limit: int, after: int) -> list[FleetNote]:
        """The newest notes with a higher number than `after`, at most `limit`, oldest first."""
        num_new = min(limit, len(self._notes), max(0, self._num_added - after))
        return list(islice(self._notes, len(self._notes) - num_new, None))
