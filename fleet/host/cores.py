"""The cores of a machine, divided among its workers, so that no worker slows another one.

    usable cores, hardware threads of one core side by side:   0 4 | 1 5 | 2 6 | 3 7
    three workers, by their ranks on the machine:              [0 4  1] [5  2] [6  3  7]

Only compute threads stay on their share. A pinned thread passes its cores on to every thread it starts, so the threads
of torch and of the C kernels stay there too. Event loops and transports run on any core.

A container may have a quota of CPU time below its cores. More threads than that only use the quota up sooner, and then
all of them stand still until the next period: with two threads and the time of one core, a step of SmolLM2 135M took
12.8 ms in the mean instead of 8.3 ms, and every tenth took 53 ms.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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


def share_of_cores(cores: Sequence[int], local_rank: int, num_sharers: int) -> tuple[int, ...]:
    """The cores of worker `local_rank` among `num_sharers` workers of this machine; at least one.

    Shares are disjoint while there are at least as many cores as sharers. A rank beyond the sharers shares the cores of
    another worker: a draining worker still holds its rank.
    """
    num_sharers = max(1, num_sharers)
    local_rank %= num_sharers
    if num_sharers > len(cores):
        return (cores[local_rank % len(cores)],)
    return tuple(cores[local_rank * len(cores) // num_sharers : (local_rank + 1) * len(cores) // num_sharers])


def num_threads_for(cores: Sequence[int], num_sharers: int, quota: float) -> int:
    """Compute threads of a worker on its share of the cores. `quota`: the cores whose time all sharers may use."""
    return max(1, int(min(len(cores), quota / max(1, num_sharers))))


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """The cores whose time this process's control group and the groups around it may use; infinite without a limit.

    A container sees its own group as the root, with version 1 under the path that the group has outside.
    """
    quota = math.inf
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        own = root / path.lstrip("/")
        quota = min(quota, *(_quota_of(group) for group in (root, own, *own.parents) if group.is_relative_to(root)))
    return quota


def _quota_of(group: Path) -> float:
    try:
        if (group / "cpu.max").is_file():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else math.inf
    except (OSError, ValueError):  # no limit here, or "max"
        return math.inf


class LocalRanks:
    """The ranks of the workers of each machine. A worker takes the lowest free rank, or that of the one it replaces."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[object, int]] = {}  # machine -> worker -> local_rank

    def take(self, machine: str, who: object, replaces: object = None) -> int:
        """`replaces` keeps its rank while both run. It may run on another machine, or not any more."""
        taken = self._taken.setdefault(machine, {})
        free = (number for number in range(len(taken) + 1) if number not in taken.values())
        taken[who] = taken[replaces] if replaces in taken else next(free)
        return taken[who]

    def restore(self, machine: str, who: object, rank: int) -> None:
        """A rank that a worker has already."""
        self._taken.setdefault(machine, {})[who] = rank

    def leave(self, who: object) -> None:
        for taken in self._taken.values():
            taken.pop(who, None)
