"""The changes of a worker since its last report. Pure: a shell and the simulator ask for the changes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from core.paths import PathStatus
from core.scheduling.block_pool import BlockEvent, BlockStored
from core.scheduling.worker_load import WorkerChanges, WorkerLoad


class ChangeTracker:
    """Remembers the load and the paths of the last report."""

    def __init__(self) -> None:
        self._load: WorkerLoad | None = None
        self._statuses: tuple[PathStatus, ...] = ()
        self._paths: dict[str, PathStatus] = {}  # the same by peer

    def take(
        self, load: WorkerLoad, block_events: Iterable[BlockEvent], paths: tuple[PathStatus, ...]
    ) -> WorkerChanges | None:
        """The changes since the last call, in which `block_events` happened; None if there are none."""
        known = self._paths
        if paths is not self._statuses:
            self._statuses, self._paths = paths, {path.peer: path for path in paths}
        changes = WorkerChanges(
            load=None if load == self._load else load,
            blocks=tuple(
                ([event.sequence_hash for event in run], is_stored)
                for is_stored, run in groupby(block_events, key=lambda event: isinstance(event, BlockStored))
            ),
            paths=() if known is self._paths else tuple(p for peer, p in self._paths.items() if known.get(peer) != p),
            removed_paths=() if known is self._paths else tuple(peer for peer in known if peer not in self._paths),
        )
        self._load = load
        is_empty = changes.load is None and not (changes.blocks or changes.paths or changes.removed_paths)
        return None if is_empty else changes
