"""The simulated network: it carries notifications, which may be lost, doubled or late, and calls, which are streams.

    notification   in order per pair, except for doubled copies; lost or doubled at random, unknown to the sender
    call           reliable, in order in both directions, with cancels; breaks when the worker dies

Each pair of machines has a base delay, and each message a random delay. So messages of different pairs arrive in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from core.handoff import HandoffMessage
from simulator.virtual.faults import NetworkFaults
from simulator.virtual.line import LONGEST, SHORTEST, Line
from simulator.virtual.world import World

SLOWNESS = 25.0


class Network:
    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self._world = world
        self.faults = faults
        self._base_delay: dict[tuple[str, str], float] = {}
        self._lines: dict[tuple[str, str], Line] = {}  # of notifications

    def line(self, source: str, target: str) -> Line:
        return Line(self._world, partial(self.delay, source, target))

    def delay(self, source: str, target: str) -> float:
        pair = (source, target)
        if pair not in self._base_delay:
            is_slow = self._world.chance(self.faults.slow_pair_share)
            self._base_delay[pair] = self.faults.delay_s * (SLOWNESS if is_slow else 1.0)
        return self._base_delay[pair] * self._world.random.uniform(SHORTEST, LONGEST)

    def notify(self, source: str, target: str, message: HandoffMessage, deliver: Callable[[], None]) -> None:
        """Send one hand-off message, unless it gets lost."""
        kind = type(message).__name__.upper()
        if self._world.chance(self.faults.loss):
            self._world.counts["lost notification"] += 1
            self._world.note(f"{source} -> {target}: {kind} is lost")
            self._world.trouble(source, target)
            return
        if self._world.chance(self.faults.doubling):
            self._world.counts["doubled notification"] += 1
            late = self._world.now + 10 * self.delay(source, target)
            self._world.at(late, deliver)
        line = self._lines.setdefault((source, target), self.line(source, target))
        line.send(deliver)
        if self._base_delay[(source, target)] > self.faults.delay_s:
            self._world.trouble(source, target)
