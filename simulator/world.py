"""Virtual time: a heap of things to do, one seeded source of chance, and a log that proves a replay is exact.

Nothing in the simulator reads a clock. The world jumps from one planned moment to the next; moments that coincide keep
the order in which they were planned. So a seed decides everything that happens, and the hash of the log shows it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

import xxhash

MAX_EVENTS = 60_000  # of one world; many times what a healthy one needs


class SimulationError(AssertionError):
    """A law was broken in virtual time. The message names the seed that replays it."""


class World:
    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        """`tell` gets every line of the log."""
        self.seed = seed
        self.now = 0.0  # seconds
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()  # what happened, by name; proves that faults took effect
        self.marks: set[str] = set()  # what happened to whom, for checks that need the cause of an effect
        self._troubled_until: dict[str, float] = {}  # by worker id
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._tell = tell
        self._log = xxhash.xxh3_64()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do `action` at `when`, or now where that has passed."""
        self._num_planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._num_planned, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `end`, or until `done` after some event."""
        while self._heap and self._heap[0][0] <= end and not done():
            self.now, _, action = heapq.heappop(self._heap)
            self.num_events += 1
            if self.num_events > MAX_EVENTS:
                raise SimulationError(f"seed {self.seed}: {MAX_EVENTS} events and no end in sight")
            action()
        if not done():
            self.now = max(self.now, end)

    def chance(self, probability: float) -> bool:
        """Draws nothing for an impossible event, so that a scenario without it stays the same."""
        return probability > 0.0 and self.random.random() < probability

    def trouble(self, *names: str, until: float = 0.0) -> None:
        """The workers of these names, or of the agents of these names, meet a fault. It lasts `until` then."""
        for name in names:
            worker_id = name.partition("@")[0]
            self._troubled_until[worker_id] = max(self._troubled_until.get(worker_id, 0.0), until, self.now)

    def end_trouble(self, worker_id: str) -> None:
        """Of a fault without a known end."""
        if self._troubled_until.get(worker_id) == math.inf:
            self._troubled_until[worker_id] = self.now

    def had_trouble(self, worker_id: str, since: float) -> bool:
        return self._troubled_until.get(worker_id, -1.0) >= since

    def note(self, line: str) -> None:
        """One line of the log."""
        stamped = f"{self.now:12.6f}  {line}"
        self._log.update(stamped.encode())
        if self._tell is not None:
            self._tell(stamped)

    @property
    def log_hash(self) -> int:
        return self._log.intdigest()
