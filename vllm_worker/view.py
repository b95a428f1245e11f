"""What a shell reports of a vLLM worker: the load of its machine, and the prefix cache of its engine."""

from __future__ import annotations

from collections.abc import Callable

from core.paths import PathStatus
from core.scheduling.block_pool import BlockEvent, BlockStored
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from vllm_worker.engine import BlocksChanged
from worker.view import ChangeTracker


class VllmView:
    """`load` reads the load of the machine, which starts after its engine."""

    paths: tuple[PathStatus, ...] = ()  # vLLM measures none

    def __init__(self, load: Callable[[], WorkerLoad]) -> None:
        self._load = load
        self._tracker = ChangeTracker()
        self._blocks: dict[int, None] = {}  # sequence hashes in the prefix cache
        self._events: list[BlockEvent] = []  # since the last report

    def note(self, changed: BlocksChanged) -> None:
        for event in changed.events:
            if isinstance(event, BlockStored):
                self._blocks[event.sequence_hash] = None
            else:
                self._blocks.pop(event.sequence_hash, None)
        self._events += changed.events

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    @property
    def load(self) -> WorkerLoad:
        return self._load()

    def take_changes(self, load: WorkerLoad) -> WorkerChanges | None:
        """What has changed since the last call, with `load` as the load of now; None if nothing has."""
        events, self._events = self._events, []
        return self._tracker.take(load, events, self.paths)
