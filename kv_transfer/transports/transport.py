"""What every transport does: one-sided reads from a peer's pool, and small notifications.

All calls come from one thread, the owner of the transport. Nothing blocks for longer than one read takes. The laws,
which tests/integration/test_transports.py holds every transport to:

  - each handle of a read comes back exactly once, from `try_complete` or, done or broken, from `poll`, also after
    `cancel`, and also after `disconnect` of its peer; from then on nothing writes into the target;
  - a call that cannot be carried out raises `PeerDisconnected` where the peer is gone, else `TransportError`;
  - the owner of the memory takes no part in a read, but both sides must `poll` for anything to get on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.plan import Runs


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool in memory: allocated once, touched once, never moved.

    `view` covers all its bytes where the host can read them, and is None for device memory (then digests are off).
    Behind the last block may be some bytes of no content, for measuring: peers read ours, and we read theirs into ours.
    """

    address: int  # of block 0
    num_blocks: int
    layout: KVLayout
    view: memoryview | None
    device: int | None = None  # CUDA device; None = host
    probe_bytes: int = 0  # a whole number of blocks

    def __post_init__(self) -> None:
        if self.view is not None and (self.view.nbytes, self.view.format) != (self.num_bytes, "B"):
            raise ValueError(f"the view must hold the pool's {self.num_bytes} bytes, holds {self.view.nbytes}")

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.probe_bytes

    def block(self, index: int) -> memoryview:
        assert self.view is not None, "device memory has no view"
        size = self.layout.block_bytes
        return self.view[index * size : (index + 1) * size]


@dataclass(frozen=True, slots=True)
class ReadDone:
    handle: int


@dataclass(frozen=True, slots=True)
class ReadBroken:
    handle: int
    error: TransportError  # PeerDisconnected where the peer is gone


@dataclass(frozen=True, slots=True)
class Notification:
    peer: str
    payload: bytes


TransportEvent = ReadDone | ReadBroken | Notification


class Transport(Protocol):
    name: str  # the agent's name, unique among all agents
    busy: bool  # whether the last poll moved anything, so that the next one should come at once

    def register(self, pool: PoolMemory) -> None:
        """Make our pool readable by peers and a target of our reads. Once, before anything else."""

    def metadata(self) -> bytes:
        """What a peer's `connect` needs; goes into our AgentAddress."""

    def connect(self, peer: AgentAddress) -> None:
        """Get ready to read from and notify `peer`. It may be found to be gone only by the first use."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer, connected or not. Reads from it break."""

    def start_read(self, peer: str, runs: Runs) -> int:
        """Copy runs of bytes from the peer's pool to ours. Returns a handle."""

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        """The same for whole blocks, where they are as large in both pools. Neighbours on both sides move as one."""

    def try_complete(self, handle: int) -> bool:
        """Whether a read has ended well before `start_read` returned; then `poll` says nothing of it."""

    def cancel(self, handle: int) -> None:
        """Break a read that has not ended."""

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a small message, to arrive in order and once while the connection lives."""

    def poll(self) -> list[TransportEvent]:
        """What happened since the last call; never waits."""

    def close(self) -> None:
        """End everything; the memory is no longer registered."""
