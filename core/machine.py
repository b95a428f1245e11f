"""The contract of a machine, which decides, and a shell, which acts.

A machine takes one event and the time, changes its state, and returns the actions for the shell. A machine never waits,
reads a clock or draws a random number, so production, tests and the simulator run the same code. `now` is in seconds on
the caller's monotonic clock; only differences have a meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

E = TypeVar("E", contravariant=True)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Tick:
    """Sent when `next_deadline()` has come. The machine acts on every deadline that has passed."""


class Machine(Protocol[E, A]):
    def handle(self, event: E, now: float) -> list[A]:
        """Decide without waiting. Raises `TandemError` only if it refuses the event, and then changes no state."""

    def next_deadline(self) -> float | None:
        """The time to send the next `Tick`; None without a deadline."""

    def check(self) -> None:
        """Assert every invariant. Tests and the simulator call this after each event."""
