"""Peer discovery: tells workers of their peers, so that they connect and measure a path before its first hand-off.

    a prefill worker learns of readers (decode workers)       a decode worker learns of owners (prefill workers)

A worker that joins and up to MAX_ANNOUNCED_PEERS workers of the other pool learn of each other. Other pairs connect at
their first hand-off. When a worker is lost, every worker of the other pool learns that it has left.

A worker may die while no router runs. So a worker that keeps reporting a path to a peer that has not joined learns that
this peer has left.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from core.lifecycle import ServiceRole
from core.paths import PeerJoined, PeerLeft
from router.requests.events import UpdatePeers
from router.routing.worker_record import WorkerRecord

MAX_ANNOUNCED_PEERS = 8  # peers that a joining worker learns of; beyond: the first hand-off connects


def announce_join(joined: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    others = _other_pool(joined, workers)
    if len(others) > MAX_ANNOUNCED_PEERS:  # a pseudorandom choice, different for each joining worker
        others = sorted(others, key=lambda other: _hash(f"{joined.worker_id} {other.worker_id}"))[:MAX_ANNOUNCED_PEERS]
    if not others:
        return []
    peers = tuple(_joined(other) for other in others)
    return [UpdatePeers(joined.worker_id, peers), *(UpdatePeers(o.worker_id, (_joined(joined),)) for o in others)]


def announce_leave(lost: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    left = PeerLeft(lost.agent.name)
    return [UpdatePeers(other.worker_id, (left,)) for other in _other_pool(lost, workers)]


def drop_absent_peers(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[UpdatePeers]:
    known = {other.agent.name for other in workers}
    left = tuple(PeerLeft(peer) for peer in worker.paths if peer not in known)
    return [UpdatePeers(worker.worker_id, left)] if left else []


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _other_pool(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """The workers with which this worker may hand over."""
    version = worker.agent.protocol_version
    return [o for o in workers if o.role is not worker.role and o.agent.protocol_version == version]


def _joined(worker: WorkerRecord) -> PeerJoined:
    return PeerJoined(worker.agent, is_owner=worker.role is ServiceRole.PREFILL)
