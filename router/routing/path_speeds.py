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

from router.routing.question import UNKNOWN_BYTES_PER_S, WorkerView

_Path = tuple[str, str]  # agents of the reader and the owner


class PathSpeeds:
    """A change of one path costs a look at the paths between its two machines: 128 workers have 16,000 paths."""

    def __init__(self, workers: Callable[[], Iterable[WorkerView]]) -> None:
        self._workers = workers
        self._changed: set[_Path] | None = None  # since the last estimate; None: workers have come or gone
        # Bytes/s between two machines, of each path and of the fastest one.
        self._between: dict[tuple[str, str], dict[_Path, float]] = {}
        self._fastest: dict[str, dict[str, float]] = {}
        self._links: dict[str, float] = {}  # of these, the fastest from each machine to another one

    def note_workers(self) -> None:
        """Workers have come or gone."""
        self._changed = None

    def note_paths(self, reader: str, owners: Iterable[str]) -> None:
        """The paths from these agents to this one have changed."""
        if self._changed is not None:
            self._changed.update((reader, owner) for owner in owners)

    def estimate(self, reader: WorkerView, owner: WorkerView) -> float:
        """Bytes/s."""
        if self._changed is None or self._changed:
            self._learn()
        one, other = reader.machine, owner.machine
        if speed := self._fastest.get(one, {}).get(other):
            return speed
        if one == other:
            return self._most_within() or self._most_between() or UNKNOWN_BYTES_PER_S
        links = [self._links[machine] for machine in (one, other) if machine in self._links]
        return min(links, default=0.0) or self._most_between() or self._most_within() or UNKNOWN_BYTES_PER_S

    def _most_within(self) -> float:
        return max((row.get(machine, 0.0) for machine, row in self._fastest.items()), default=0.0)

    def _most_between(self) -> float:
        return max(self._links.values(), default=0.0)

    def _learn(self) -> None:
        """Look at the paths that have changed."""
        workers = {worker.agent_name: worker for worker in self._workers()}
        changed = self._changed
        if changed is None:
            changed = {(name, owner) for name, reader in workers.items() for owner in reader.paths}
            self._between, self._fastest, self._links = {}, {}, {}
        self._changed = set()
        pairs = set()
        for path in changed:
            reader, owner = (workers.get(name) for name in path)
            if reader is None or owner is None:
                continue
            status = reader.paths.get(owner.agent_name)
            pair = min(reader.machine, owner.machine), max(reader.machine, owner.machine)
            self._between.setdefault(pair, {})[path] = 0.0 if status is None else status.bytes_per_s
            pairs.add(pair)
        for one, other in pairs:
            speed = max(self._between[one, other].values())
            for machine, peer in ((one, other), (other, one)):
                self._fastest.setdefault(machine, {})[peer] = speed
        for machine in {machine for pair in pairs for machine in pair}:
            links = (speed for peer, speed in self._fastest[machine].items() if peer != machine and speed)
            if fastest := max(links, default=0.0):
                self._links[machine] = fastest
            else:
                self._links.pop(machine, None)
