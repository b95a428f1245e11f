"""The speed of a path that no worker has measured: that of the measured paths that are most like it.

    between the same two machines    the fastest path
    else between two machines        the slower of the fastest paths that each has to another machine, else the fastest
                                     path between any two
    else within one machine          the fastest path within any machine
    else                             the fastest path of all; 10 GB/s without any

The fastest, because reads share links: a busy link measures less than it carries. Only the newest reports of workers of
the fleet count, so a path that has become slow counts as slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.routing.policy import UNKNOWN_BYTES_PER_S, WorkerView

_Machines = tuple[str, str]  # sorted


class PathSpeeds:
    def __init__(self, workers: Callable[[], Iterable[WorkerView]]) -> None:
        self._workers = workers
        self._fastest: dict[_Machines, float] | None = None  # bytes/s; None: out of date
        self._estimates: dict[_Machines, float] = {}

    def note_change(self) -> None:
        """Workers or their paths have changed."""
        self._fastest = None

    def estimate(self, reader: WorkerView, owner: WorkerView) -> float:
        """Bytes/s."""
        if self._fastest is None:
            self._fastest, self._estimates = self._measured(), {}
        pair = _pair(reader, owner)
        if pair not in self._estimates:
            self._estimates[pair] = _most_alike(self._fastest, pair) or UNKNOWN_BYTES_PER_S
        return self._estimates[pair]

    def _measured(self) -> dict[_Machines, float]:
        found: dict[_Machines, float] = {}
        by_agent = {worker.agent_name: worker for worker in self._workers()}
        for reader in by_agent.values():
            for path in reader.paths.values():
                if path.bytes_per_s and (owner := by_agent.get(path.peer)) is not None:
                    pair = _pair(reader, owner)
                    found[pair] = max(found.get(pair, 0.0), path.bytes_per_s)
        return found


def _pair(one: WorkerView, other: WorkerView) -> _Machines:
    return min(one.machine, other.machine), max(one.machine, other.machine)


def _most_alike(fastest: dict[_Machines, float], pair: _Machines) -> float:
    """0 if nothing is measured."""
    is_local = pair[0] == pair[1]
    alike = {key: speed for key, speed in fastest.items() if (key[0] == key[1]) is is_local}
    links = [max((speed for key, speed in alike.items() if machine in key), default=0.0) for machine in pair]
    known = [speed for speed in links if speed]
    return fastest.get(pair) or min(known, default=0.0) or max(alike.values() or fastest.values(), default=0.0)
