"""The deadlines of a machine in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

MAX_TICKS_AT_ONCE = 100


def deadlines_until(end: float, next_deadline: Callable[[], float | None]) -> Iterator[float]:
    """Each deadline up to `end`, for a machine that gets a Tick at each. A machine that never acts on one fails."""
    last, num_at_once = 0.0, 0
    while (deadline := next_deadline()) is not None and deadline <= end:
        last, num_at_once = (deadline, 0) if deadline > last else (last, num_at_once + 1)
        assert num_at_once < MAX_TICKS_AT_ONCE, f"the machine has not acted on its deadline at {deadline:g}"
        yield deadline
