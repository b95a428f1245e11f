"""Who is told of whom, so that each pair of prefill and decode worker is connected before its first hand-off.

    prefill worker <--- readers: the decode workers        decode worker <--- owners: the prefill workers

A worker that joins meets everybody of the other pool, and they meet it; joining again says the same again, which costs
nothing where it is known. Whoever is lost is let go by the others. Nothing waits for any of this.

Who died while no router lived was lost to none: the others would look for it for ever. So a worker that goes on
reporting a path to somebody who has not joined is told to let it go.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.lifecycle import ServiceRole
from core.paths import PeerDismissed, PeerIntroduced
from router.events import Introduce
from router.workers import WorkerRecord


def introduce(joined: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Introduce]:
    others = _other_pool(joined, workers)
    if not others:
        return []
    told = tuple(_introduced(other) for other in others)
    return [Introduce(joined.worker_id, told), *(Introduce(o.worker_id, (_introduced(joined),)) for o in others)]


def dismiss(lost: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Introduce]:
    gone = PeerDismissed(lost.agent.name)
    return [Introduce(other.worker_id, (gone,)) for other in _other_pool(lost, workers)]


def dismiss_strangers(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Introduce]:
    known = {other.agent.name for other in workers}
    gone = tuple(PeerDismissed(path.peer) for path in worker.load.paths if path.peer not in known)
    return [Introduce(worker.worker_id, gone)] if gone else []


def _other_pool(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    return [other for other in workers if other.role is not worker.role]


def _introduced(worker: WorkerRecord) -> PeerIntroduced:
    return PeerIntroduced(worker.agent, is_owner=worker.role is ServiceRole.PREFILL)
