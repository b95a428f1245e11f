"""The cores of a machine, divided among its workers, so that no worker slows another one.

    usable cores, hardware threads of one core side by side:   0 4 | 1 5 | 2 6 | 3 7
    three workers, by their seats on the machine:              [0 4  1] [5  2] [6  3  7]

Only compute threads stay on their share. A pinned thread passes its cores on to every thread it starts, so the threads
of torch and of the C kernels stay there too. Event loops and transports run on any core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores(topology: Path = TOPOLOGY) -> list[int]:
    """The cores that this process may use, ordered so that neighbours share a core, then a socket."""

    def place(core: int) -> tuple[int, int, int]:
        directory = topology / f"cpu{core}" / "topology"
        try:
            socket = int((directory / "physical_package_id").read_text())
            return socket, int((directory / "core_id").read_text()), core
        except (OSError, ValueError):  # the kernel gives no topology: order by number
            return 0, core, core

    return sorted(os.sched_getaffinity(0), key=place)


def share_of_cores(cores: Sequence[int], seat: int, num_sharers: int) -> tuple[int, ...]:
    """The cores of worker `seat` among `num_sharers` workers of this machine; at least one.

    Shares are disjoint while there are at least as many cores as sharers. A seat beyond the sharers (a draining worker
    still holds its seat) shares the cores of another worker.
    """
    num_sharers = max(1, num_sharers)
    seat %= num_sharers
    if num_sharers > len(cores):
        return (cores[seat % len(cores)],)
    return tuple(cores[seat * len(cores) // num_sharers : (seat + 1) * len(cores) // num_sharers])


class Seats:
    """The seats of each machine: a worker takes the lowest free number."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[int, object]] = {}  # machine -> seat -> worker

    def take(self, machine: str, who: object) -> int:
        taken = self._taken.setdefault(machine, {})
        seat = next(number for number in range(len(taken) + 1) if number not in taken)
        taken[seat] = who
        return seat

    def leave(self, who: object) -> None:
        """Free the seat of `who`, if there is one."""
        for taken in self._taken.values():
            for seat in [seat for seat, holder in taken.items() if holder == who]:
                del taken[seat]
