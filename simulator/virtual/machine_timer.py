"""The timer of a machine in virtual time: it sends Tick at the machine's deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.machine import Machine, Tick
from simulator.virtual.world import World

TIMER_LATENESS_S = 1e-6  # like an event loop; rounding between two clocks never makes a timer early


class MachineTimer:
    """`post` handles the Tick, and calls `update` afterwards, as after every event.

    `offset_s` is the clock of the machine less that of the world.
    """

    def __init__(
        self, world: World, machine: Machine[Any, Any], post: Callable[[Tick], None], offset_s: float = 0.0
    ) -> None:
        self._world, self._machine, self._post, self._offset_s = world, machine, post, offset_s
        self._set_for: float | None = None  # the deadline of the earliest planned timer

    def update(self) -> None:
        """Call after each event of the machine. A later deadline keeps the timer, which then sets itself again."""
        deadline = self._machine.next_deadline()
        if deadline is not None and (self._set_for is None or deadline < self._set_for):
            self._set_for = deadline
            self._world.at(deadline - self._offset_s + TIMER_LATENESS_S, lambda: self._on_timer(deadline))

    def stop(self) -> None:
        """Send no Tick until the next `update`."""
        self._set_for = None

    def _on_timer(self, planned: float) -> None:
        if planned != self._set_for:
            return
        self._set_for = None
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= self._world.now + self._offset_s:
            self._post(Tick())
        else:
            self.update()
