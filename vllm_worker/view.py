"""What a shell reports of a vLLM worker: the load of its machine, and the prefix cache of its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.paths import PathStatus
from core.scheduling.block_pool import BlockEvent, BlockStored, Column
from core.scheduling.ledger import BlockHolder
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from vllm_worker.engine import BlocksChanged
from vllm_worker.machine import VllmMachine
from worker.view import ChangeTracker


class VllmView:
    """The machine starts after its engine, whose first reports may come before."""

    paths: tuple[PathStatus, ...] = ()  # vLLM measures none

    def __init__(self, machine: Callable[[], VllmMachine]) -> None:
        self._machine = machine
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
        return self._machine().worker_load()

    @property
    def is_idle(self) -> bool:
        return self._machine().idle

    @property
    def ledger(self) -> Mapping[Column, int]:
        return self.load.ledger

    def holders(self, now: float) -> list[BlockHolder]:
        machine = self._machine()
        return machine.load.holders(machine.open_calls, now)

    def take_changes(self, load: WorkerLoad) -> WorkerChanges | None:
        """What has changed since the last call, with `load` as the load of now; None if nothing has."""
        events, self._events = self._events, []
        return self._tracker.take(load, events, self.paths)
