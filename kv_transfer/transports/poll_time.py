"""Whether a poll of UCX moved bytes, judged by its duration.

UCX does not report the copies that our CPU makes for a peer that reads from us (over TCP, or through buffers in shared
memory). An empty poll is short, unless the last poll is so long ago that UCX's code has left the CPU's caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

EMPTY_POLL_S = 30e-6
WARM_S = 0.002


class PollTime:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_at = self._ended_at = 0.0
        self._warm = False

    def begin(self) -> None:
        self._begun_at = self._clock()
        self._warm = self._begun_at - self._ended_at < WARM_S

    def end(self) -> bool:
        """Whether the poll that began took longer than an empty one."""
        self._ended_at = self._clock()
        return self._warm and self._ended_at - self._begun_at > EMPTY_POLL_S
