"""Handshakes of the engine of a decode worker with those of prefill workers, before their first hand-offs.

    PeerJoined -> waiting -> ShakeHands -> HandshakeEnded -> met, or forgotten     PeerLeft: forgotten

One at a time: vLLM shakes hands on one thread, so the first hand-off from another peer waits for at most one of these.
A handshake that fails is left to the first hand-off from that peer, or to the next announcement of it. A prefill worker
that starts again is another peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.handoff import AgentAddress
from vllm_worker.engine import HandshakeEnded

MAX_PEERS = 64  # remembered; above, the oldest is forgotten


@dataclass(frozen=True, slots=True)
class ShakeHands:
    """Connect the engine to that of a peer."""

    peer: str
    address: bytes


@dataclass(slots=True)
class Handshakes:
    _waiting: dict[str, bytes] = field(default_factory=dict)  # by name of the peer, oldest first
    _current: str = ""
    _met: dict[str, None] = field(default_factory=dict)

    def join(self, peer: AgentAddress) -> list[ShakeHands]:
        """Queue a handshake with a peer, unless it has one. Idempotent, since every router announces the peer."""
        if peer.metadata and peer.name != self._current and peer.name not in self._met:
            self._waiting.setdefault(peer.name, peer.metadata)
            _bound(self._waiting)
        return self._next()

    def leave(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._met.pop(name, None)

    def end(self, ended: HandshakeEnded) -> list[ShakeHands]:
        if ended.peer != self._current:
            return []
        self._current = ""
        if not ended.error:
            self._met[ended.peer] = None
            _bound(self._met)
        return self._next()

    def stop(self) -> None:
        """Drop the queue. The current handshake may still end."""
        self._waiting.clear()

    def _next(self) -> list[ShakeHands]:
        if self._current or not self._waiting:
            return []
        self._current = next(iter(self._waiting))
        return [ShakeHands(self._current, self._waiting.pop(self._current))]

    def check(self) -> None:
        assert self._current or not self._waiting
        assert not self._waiting.keys() & {self._current, *self._met}
        assert max(len(self._waiting), len(self._met)) <= MAX_PEERS


def _bound(peers: dict[str, bytes] | dict[str, None]) -> None:
    if len(peers) > MAX_PEERS:
        del peers[next(iter(peers))]
