"""What a shell may read of the machine of its worker: its state, its holders of blocks, and what has changed in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Protocol

from core.paths import PathStatus
from core.scheduling.block_pool import BlockEvent, BlockStored, Column
from core.scheduling.ledger import BlockHolder, Claim, count_once
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from kv_transfer.protocol.machine import TransferMachine
from worker.core import WorkerCore


class WorkerMachine(Protocol):
    """prefill_worker.machine.PrefillMachine or decode_worker.machine.DecodeMachine"""

    core: WorkerCore
    transfers: TransferMachine

    def handle(self, event: Any, now: float) -> list[Any]: ...

    def next_deadline(self) -> float | None: ...

    def check(self) -> None: ...

    def load(self) -> WorkerLoad: ...

    def claims(self) -> list[Claim]: ...

    @property
    def idle(self) -> bool: ...

    @property
    def transfers_alive(self) -> bool: ...


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


class WorkerMachineView:
    """Reads one machine, between its events. Only `take_changes` changes anything: it takes their events."""

    def __init__(self, machine: WorkerMachine) -> None:
        self._machine = machine
        self._tracker = ChangeTracker()

    @property
    def is_idle(self) -> bool:
        """No request, no transfer and no step is open."""
        return self._machine.idle and self.step_started_at is None

    @property
    def transfers_alive(self) -> bool:
        return self._machine.transfers_alive

    @property
    def step_started_at(self) -> float | None:
        """When the oldest step in flight started; None without a step."""
        core = self._machine.core
        return core.step_started_at if core.scheduler.num_steps_in_flight else None

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        """Sequence hashes of the prefix cache, and, by `hash_on_disk`, of the disk."""
        core = self._machine.core
        return (*core.pool.registered_hashes(), *(() if core.tier is None else core.tier.hashes()))

    @property
    def load(self) -> WorkerLoad:
        return self._machine.load()

    @property
    def paths(self) -> tuple[PathStatus, ...]:
        return self._machine.transfers.paths

    @property
    def ledger(self) -> dict[Column, int]:
        return self._machine.core.pool.ledger()

    def holders(self, now: float) -> list[BlockHolder]:
        return count_once(self._machine.claims(), self._machine.core.pool, now)

    def take_changes(self, load: WorkerLoad) -> WorkerChanges | None:
        """What has changed since the last call, with `load` as the load of now; None if nothing has."""
        core = self._machine.core
        events = core.pool.drain_events()
        if core.tier is not None:
            events += core.tier.drain_events()
        return self._tracker.take(load, events, self.paths)
