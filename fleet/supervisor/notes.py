"""What has happened to the fleet: notes for operators, and updates for `tandem serve`."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

from core.fleet_control import FleetNote
from fleet.law.events import FleetFailed, FleetMessage, FleetReady, FleetStopped

MAX_NOTES = 1000  # notes of the supervisor, for `tandem events`; beyond: the oldest is dropped
MAX_UPDATES = 1000  # updates that `tandem serve` has not printed; beyond: the oldest is dropped

FleetUpdate = FleetMessage | FleetReady | FleetFailed | FleetStopped


class NoteRing:
    """The newest notes, with their numbers and times."""

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


class UpdateQueue:
    """The newest updates that nobody has taken."""

    def __init__(self) -> None:
        self._updates: deque[FleetUpdate] = deque(maxlen=MAX_UPDATES)
        self._has_some = asyncio.Event()

    def add(self, update: FleetUpdate) -> None:
        self._updates.append(update)
        self._has_some.set()

    async def take(self) -> list[FleetUpdate]:
        """Waits until there is one."""
        await self._has_some.wait()
        self._has_some.clear()
        updates = list(self._updates)
        self._updates.clear()
        return updates
