"""Peer discovery: which workers are told of each other, so that paths are connected and measured before a hand-off.

    prefill worker <--- readers: decode workers        decode worker <--- owners: prefill workers

A worker that joins is introduced to MAX_INTRODUCED peers of the other pool, and they to it. Other pairs connect with
their first hand-off. A worker that is lost is forgotten by the other pool.

The death of a peer while no router was running is reported to nobody. So a worker that goes on reporting a path to a
peer that has not joined is told that the peer has left.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from core.lifecycle import ServiceRole
from core.paths import PeerJoined, PeerLeft
from router.events import UpdatePeers
from router.workers import WorkerRecord

MAX_INTRODUCED = 8


def announce(joined: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    others = _other_pool(joined, workers)
    if len(others) > MAX_INTRODUCED:  # a choice that spreads the workers that join over the pool
        others = sorted(others, key=lambda other: _hash(f"{joined.worker_id} {other.worker_id}"))[:MAX_INTRODUCED]
    if not others:
        return []
    told = tuple(_joined(other) for other in others)
    return [UpdatePeers(joined.worker_id, told), *(UpdatePeers(o.worker_id, (_joined(joined),)) for o in others)]


def forget(lost: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    left = PeerLeft(lost.agent.name)
    return [UpdatePeers(other.worker_id, (left,)) for other in _other_pool(lost, workers)]


def forget_strangers(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    known = {other.agent.name for other in workers}
    left = tuple(PeerLeft(path.peer) for path in worker.load.paths if path.peer not in known)
    return [UpdatePeers(worker.worker_id, left)] if left else []


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _other_pool(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    return [other for other in workers if other.role is not worker.role]


def _joined(worker: WorkerRecord) -> PeerJoined:
    return PeerJoined(worker.agent, is_owner=worker.role is ServiceRole.PREFILL)
