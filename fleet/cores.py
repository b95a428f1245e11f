"""Which cores a worker computes on: the machine's are divided among the workers on it, so that none slows another down.

    cores this process may use, hardware threads of one core side by side:   0 4 | 1 5 | 2 6 | 3 7
    three workers, by their seats on the machine:                            [0 4  1] [5  2] [6  3  7]

Only compute threads stay on their share: a thread that was pinned hands its cores on to every thread it makes, which is
how torch's and the kernels' threads get theirs. Event loops and transports stay free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores(topology: Path = TOPOLOGY) -> list[int]:
    """Those this process may use, ordered so that neighbours in the list share what can be shared (core, socket)."""

    def place(core: int) -> tuple[int, int, int]:
        directory = topology / f"cpu{core}" / "topology"
        try:
            socket = int((directory / "physical_package_id").read_text())
            return socket, int((directory / "core_id").read_text()), core
        except (OSError, ValueError):  # not told here: numbers alone
            return 0, core, core

    return sorted(os.sched_getaffinity(0), key=place)


def share_of_cores(cores: Sequence[int], seat: int, num_sharers: int) -> tuple[int, ...]:
    """The cores for worker `seat` of `num_sharers` on this machine; at least one.

    Shares are disjoint while there are as many cores as sharers; with more sharers, some have the same core. A seat
    beyond the sharers (a worker that drains still holds its own) shares with one of them.
    """
    num_sharers = max(1, num_sharers)
    seat %= num_sharers
    if num_sharers > len(cores):
        return (cores[seat % len(cores)],)
    return tuple(cores[seat * len(cores) // num_sharers : (seat + 1) * len(cores) // num_sharers])


class Seats:
    """Who sits where: each worker has the lowest number that is free on its machine."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[int, object]] = {}  # machine -> seat -> who

    def take(self, machine: str, who: object) -> int:
        taken = self._taken.setdefault(machine, {})
        seat = next(number for number in range(len(taken) + 1) if number not in taken)
        taken[seat] = who
        return seat

    def leave(self, who: object) -> None:
        """Nothing happens where they have none."""
        for taken in self._taken.values():
            for seat in [seat for seat, holder in taken.items() if holder == who]:
                del taken[seat]
