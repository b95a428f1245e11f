"""Virtual time: a heap of planned actions, one seeded random generator, and a log.

No part of the simulator reads a clock. The world jumps from one planned time to the next. Actions of the same time run
in the order in which they were planned. So a seed decides every event, and equal hashes of two logs prove it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

import xxhash

MAX_EVENTS = 60_000  # of a world with faults; a healthy one needs far fewer


class SimulationError(AssertionError):
    """A rule was broken in virtual time. The message names the seed to replay."""


class World:
    def __init__(
        self,
        seed: int,
        print_line: Callable[[str], None] | None = None,
        max_events: int | None = None,
        *,
        is_checked: bool = True,
    ) -> None:
        """`print_line` receives every line of the log. Without checks, there is no log either: a replay has millions of
        events."""
        self.seed = seed
        self.is_checked = is_checked  # each machine checks itself after each of its events
        self.max_events = max_events or MAX_EVENTS
        self.now = 0.0  # seconds
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()  # of events, by name; tests check that faults took effect
        self.marks: set[str] = set()  # faults with the requests or workers they affect, for the checks
        self._troubled_until: dict[tuple[str, str], float] = {}  # by worker id and router, "" = for all routers
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._print_line = print_line
        self._log = xxhash.xxh3_64()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at `when`; now if `when` has passed."""
        self._num_planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._num_planned, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Advance time to `end`, or until `done` returns True after an action."""
        while self._heap and self._heap[0][0] <= end and not done():
            self.now, _, action = heapq.heappop(self._heap)
            self.num_events += 1
            if self.num_events > self.max_events:
                raise SimulationError(f"seed {self.seed}: no end after {self.max_events} events")
            action()
        if not done():
            self.now = max(self.now, end)

    def chance(self, probability: float) -> bool:
        """True with this probability. Probability 0 draws no random number, so other draws stay the same."""
        return probability > 0.0 and self.random.random() < probability

    def trouble(self, *names: str, until: float = 0.0, router: str = "") -> None:
        """Record a fault that affects these workers until `until`. `names` are worker ids or names of agents.

        With `router`, it lasts until this router knows its end.
        """
        for name in names:
            key = name.partition("@")[0], router
            self._troubled_until[key] = max(self._troubled_until.get(key, 0.0), until, self.now)

    def end_trouble(self, worker_id: str, router: str) -> None:
        """End a fault that was recorded without a known end."""
        if self._troubled_until.get((worker_id, router)) == math.inf:
            self._troubled_until[worker_id, router] = self.now

    def had_trouble(self, worker_id: str, since: float) -> bool:
        return any(until >= since for (name, _), until in self._troubled_until.items() if name == worker_id)

    def note(self, line: str) -> None:
        """Append a line to the log."""
        if not self.is_checked:
            return
        stamped = f"{self.now:12.6f}  {line}"
        self._log.update(stamped.encode())
        if self._print_line is not None:
            self._print_line(stamped)

    @property
    def log_hash(self) -> int:
        return self._log.intdigest()
