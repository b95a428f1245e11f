"""How fast reads from each peer run, seen in passing: no probe, and no memory but that of the last window.

The time that counts is that in which at least one read was in flight, so reads side by side are not counted twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kv_transfer.events import PathSeen

WINDOW_BYTES = 268_435_456  # less says more about latency than about speed; and each full one is news to handle


@dataclass(slots=True)
class PathSpeed:
    num_in_flight: int = 0
    num_bytes: int = 0  # of the window
    seconds: float = 0.0
    since: float = 0.0  # the reads in flight began, or the window did

    def begin(self, now: float) -> None:
        if not self.num_in_flight:
            self.since = now
        self.num_in_flight += 1

    def end(self, num_bytes: int, now: float) -> float | None:
        """A read has ended, with that many bytes. Returns bytes per second where the window is full, and opens a new
        one."""
        if not self.num_in_flight:
            return None  # it began on an earlier connection
        self.num_in_flight -= 1
        self.num_bytes += num_bytes
        self.seconds += now - self.since
        self.since = now
        if self.num_bytes < WINDOW_BYTES or self.seconds <= 0.0:
            return None
        speed = self.num_bytes / self.seconds
        self.num_bytes, self.seconds = 0, 0.0
        return speed


class PathSpeeds:
    """Of all peers, since each was connected."""

    def __init__(self) -> None:
        self._paths: dict[str, PathSpeed] = {}

    def begin(self, peer: str) -> None:
        self._paths.setdefault(peer, PathSpeed()).begin(time.monotonic())

    def end(self, peer: str, num_bytes: int) -> list[PathSeen]:
        """A read from `peer` has ended with that many bytes; one `PathSeen` where that fills the window."""
        path = self._paths.get(peer)
        speed = None if path is None else path.end(num_bytes, time.monotonic())
        return [] if speed is None else [PathSeen(peer, speed)]

    def forget(self, peer: str) -> None:
        self._paths.pop(peer, None)
