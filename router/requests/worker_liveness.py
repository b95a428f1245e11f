"""The liveness of workers. A worker joins with a snapshot, and leaves when it falls silent or its loss is reported.

Laws:
  1. A worker without a report for `worker_lost_s` is lost.
  2. A worker that joins with another incarnation has restarted, and its calls are lost.
  3. Workers of the other pool learn of each worker that joins or leaves (`peer_discovery`).
"""

from __future__ import annotations

from collections.abc import Collection

from core.deadlines import Deadlines
from router.requests import peer_discovery
from router.requests.events import UpdatePeers, WorkerJoined, WorkerLost
from router.routing.worker_record import WorkerRecord
from router.routing.workers import WorkerTable


class WorkerLiveness:
    def __init__(self, workers: WorkerTable, router_id: str) -> None:
        self._workers = workers
        self._router_id = router_id
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines()  # ("silent" | "absent peers", worker id)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def check_again(self, now: float) -> None:
        """Look at every worker now: `worker_lost_s` has changed."""
        for record in self._workers:
            self._deadlines.set(("silent", record.worker_id), now)

    def record_of(self, event: WorkerJoined, now: float) -> WorkerRecord:
        """Raises `LayoutMismatch` if the worker does not fit the others. Changes nothing."""
        max_in_flight = self._workers.config.max_in_flight(event.agent.location.on_gpu)
        paths = {path.peer: path for path in event.paths}
        record = WorkerRecord(
            event.worker_id, event.role, event.agent, event.load, now, self._router_id, max_in_flight, paths=paths
        )
        self._workers.refuse_layout(record)
        return record

    def has_restarted(self, record: WorkerRecord) -> bool:
        known = self._workers.get(record.worker_id)
        return known is not None and known.agent.incarnation != record.agent.incarnation

    def join(self, record: WorkerRecord, cached_blocks: Collection[int], now: float) -> list[UpdatePeers]:
        self._workers.join(record, cached_blocks)
        self._deadlines.set(("silent", record.worker_id), now + self._workers.config.worker_lost_s)
        self._deadlines.set(("absent peers", record.worker_id), now + self._workers.config.worker_lost_s)
        return peer_discovery.announce_join(record, self._workers)

    def leave(self, worker_id: str, now: float) -> tuple[WorkerRecord | None, list[UpdatePeers]]:
        """Remove a worker. Its record is None if it has not joined."""
        record = self._workers.leave(worker_id, now)
        if record is None:
            return None, []
        self._deadlines.cancel(("silent", worker_id))
        self._deadlines.cancel(("absent peers", worker_id))
        return record, peer_discovery.announce_leave(record, self._workers)

    def expire(self, now: float) -> tuple[list[WorkerLost], list[UpdatePeers]]:
        """The losses that are due now, for the machine to handle, and what workers learn of their absent peers."""
        lost: list[WorkerLost] = []
        updates: list[UpdatePeers] = []
        for kind, worker_id in self._deadlines.expire(now):
            record = self._workers.chosen(worker_id)  # its deadlines end with the worker
            due = record.reported_at + self._workers.config.worker_lost_s
            if kind == "absent peers":
                self._deadlines.set((kind, worker_id), now + self._workers.config.worker_lost_s)
                updates += peer_discovery.drop_absent_peers(record, self._workers) if due > now else []
            elif due > now:  # reports come by the thousand, so they move no deadline
                self._deadlines.set((kind, worker_id), due)
            else:
                lost.append(WorkerLost(worker_id, f"silent for {self._workers.config.worker_lost_s:g} s"))
        return lost, updates

    def check(self) -> None:
        """Each worker has both deadlines, and a lost worker has none."""
        num_workers = len(list(self._workers))
        assert len(self._deadlines) == 2 * num_workers, f"{len(self._deadlines)} deadlines of {num_workers} workers"
