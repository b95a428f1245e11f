"""A line of messages between two processes: in order, each after a random delay."""

from __future__ import annotations

import random
from collections.abc import Callable

from simulator.virtual.world import World

SHORTEST, LONGEST = 0.5, 2.5  # beside the typical delay


class Line:
    def __init__(self, world: World, draw_delay: Callable[[], float]) -> None:
        self._world, self._draw_delay = world, draw_delay
        self._arrives_last = 0.0

    def send(self, deliver: Callable[[], None]) -> None:
        """Send a message now; `deliver` is called when it arrives."""
        self._arrives_last = when = max(self._world.now + self._draw_delay(), self._arrives_last)
        self._world.at(when, deliver)


def independent_line(world: World, source: str, target: str, delay_s: float) -> Line:
    """A line with random numbers of its own: what happens elsewhere does not change its delays."""
    chance = random.Random(f"from {source} to {target} of {world.seed}")
    return Line(world, lambda: delay_s * (SHORTEST + (LONGEST - SHORTEST) * chance.random()))
