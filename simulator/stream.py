"""A stream of messages from one machine to another in a replay: in order, each after a random delay."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from simulator.world import World

SHORTEST, LONGEST = 0.5, 2.5  # beside the typical delay


class Stream:
    """`deliver` takes a message when it arrives. Each stream has random numbers of its own: what happens elsewhere does
    not change its delays."""

    def __init__(self, world: World, source: str, target: str, delay_s: float, deliver: Callable[[Any], None]) -> None:
        self._world, self._delay_s, self._deliver = world, delay_s, deliver
        self._chance = random.Random(f"from {source} to {target} of {world.seed}")
        self._arrives_last = 0.0

    def send(self, message: Any, deliver: Callable[[Any], None] | None = None) -> None:
        """Send a message now. `deliver` replaces that of the stream."""
        delay_s = self._delay_s * (SHORTEST + (LONGEST - SHORTEST) * self._chance.random())
        self._arrives_last = when = max(self._world.now + delay_s, self._arrives_last)
        self._world.at(when, partial(deliver or self._deliver, message))
