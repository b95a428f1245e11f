"""How long the traffic must have been quiet before a worker leaves.

QUIET_STARTS start-ups, at least LEAST_S    as long as no worker has come back
twice that for each shrink of the newest REMEMBERED_S that was regretted: the fleet grew again within REGRET_S
MOST_S                                      at most, or the first of these if it is longer
"""

from __future__ import annotations

import math
from collections import deque

QUIET_STARTS = 2.0
LEAST_S = 60.0
MOST_S = 3600.0
REGRET_S = 3600.0
REMEMBERED_S = 43_200.0  # half a day: traffic that rises and falls with the day has few regrets in it


class QuietTime:
    def __init__(self) -> None:
        self._shrunk_at = -math.inf
        self._regretted: deque[float] = deque()

    def shrunk(self, now: float) -> None:
        self._shrunk_at = now

    def grew(self, now: float) -> None:
        if now - self._shrunk_at < REGRET_S:
            self._regretted.append(now)
        self._shrunk_at = -math.inf  # one growth regrets one shrink

    def since_shrunk(self, now: float) -> float:
        return now - self._shrunk_at

    def seconds(self, start_s: float, now: float) -> float:
        while self._regretted and self._regretted[0] < now - REMEMBERED_S:
            self._regretted.popleft()
        least = max(LEAST_S, QUIET_STARTS * start_s)
        return max(least, min(MOST_S, least * 2.0 ** len(self._regretted)))
