"""The contract between deciding and acting.

A machine takes one event and the time, changes its own state, and returns the actions a shell must perform. It never
waits, reads a clock, or draws a random number it was not given, so production, tests and the simulator drive the same
object. `now` is seconds on the caller's own monotonic clock; only differences mean anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

E = TypeVar("E", contravariant=True)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Tick:
    """Sent when `next_deadline()` has come; the machine looks at its clocks."""


class Machine(Protocol[E, A]):
    def handle(self, event: E, now: float) -> list[A]:
        """Decide; never wait. Raises `TandemError` only where the event itself is refused, leaving no trace of it."""

    def next_deadline(self) -> float | None:
        """When to send `Tick`; None while no clock is running."""

    def check(self) -> None:
        """Assert every invariant; tests and the simulator call it after each event."""
