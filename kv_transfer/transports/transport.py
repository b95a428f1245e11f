"""The interface of a transport: one-sided reads from a peer's pool, and small notifications.

All calls come from one thread, the owner of the transport. No call takes longer than one read. The laws, which
tests/integration/test_transports.py checks for every transport:

  - each read ends exactly once, by `try_complete` or by an event of `poll`, also after `cancel` and after `disconnect`
    of its peer; after its end nothing writes into the target;
  - a call that fails raises `PeerDisconnected` where the peer or its connection is gone, else `TransportError`. Soon
    after the end of a connection, the next one to the same living peer may end so, too: the caller connects again;
  - the owner of the memory takes no part in a read, but both sides must `poll` for a read to progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.protocol.digests import Digests, of_blocks, of_pieces
from kv_transfer.protocol.plan import Runs, Span, merged, runs_of_blocks


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool in memory: allocated once, touched once, never moved.

    `view` covers all bytes of a pool in host memory; None: `memory` reaches the pool's device. The bytes behind the
    last block hold no KV: a probe reads those of a peer into ours.

    With `num_parts`, a block is no single run of bytes but equal parts, each in an array of its own: part 0 of all
    blocks, then part 1 of all blocks, and so on. Only pools with equal layouts and as many parts exchange blocks.
    """

    address: int  # of block 0
    num_blocks: int
    layout: KVLayout
    view: memoryview | None
    device: int | None = None  # CUDA device; None = host
    probe_bytes: int = 0  # a whole number of blocks
    memory: DeviceMemory | None = None  # of a pool on a device; None: only the transport reaches the pool
    num_parts: int = 1

    def __post_init__(self) -> None:
        if self.layout.block_bytes % self.num_parts:
            raise ValueError(f"{self.layout.block_bytes} bytes of a block do not divide into {self.num_parts} parts")
        if self.view is not None and (self.view.nbytes, self.view.format) != (self.num_bytes, "B"):
            raise ValueError(f"the view must hold the pool's {self.num_bytes} bytes, holds {self.view.nbytes}")

    @property
    def has_digests(self) -> bool:
        """Whether this process can compute digests of whole blocks."""
        return self.view is not None or self.memory is not None

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.probe_bytes

    def block(self, index: int) -> memoryview:
        assert self.view is not None, "device memory has no view"
        size = self.layout.block_bytes
        return self.view[index * size : (index + 1) * size]

    def host_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """For `copy_out` and `copy_in`."""
        return np.zeros(num_bytes, np.uint8) if self.memory is None else self.memory.host_buffer(num_bytes)

    def copy_out(self, index: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy a block of a pool that `has_digests` to the host. Raises `TransportError` where the device fails."""
        if self.memory is None:
            np.copyto(target, np.frombuffer(self.block(index), np.uint8))
        else:
            self.memory.copy_out(index, target)

    def copy_in(self, index: int, content: npt.NDArray[np.uint8]) -> None:
        """Likewise from the host into a block."""
        if self.memory is None:
            np.copyto(np.frombuffer(self.block(index), np.uint8), content)
        else:
            self.memory.copy_in(index, content)

    def block_runs(
        self, peer: AgentAddress, sources: Sequence[int], targets: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Runs from blocks of a peer's pool with equal blocks into blocks of this one."""
        pairs = list(zip(sources, targets, strict=True))
        if self.num_parts == 1:
            return runs_of_blocks(pairs, self.layout.block_bytes)
        size = self.layout.block_bytes // self.num_parts
        starts = [(part * peer.num_blocks, part * self.num_blocks) for part in range(self.num_parts)]
        return merged(
            ((theirs + source) * size, (ours + target) * size, size)
            for theirs, ours in starts
            for source, target in pairs
        )

    def digests(self, blocks: Iterable[int]) -> Digests:
        """XXH3_64 of each block of a pool in host memory, part by part."""
        assert self.view is not None, "a device computes the digests of its own memory"
        if self.num_parts == 1:
            return of_blocks(self.view, blocks, self.layout.block_bytes)
        return of_pieces(self.view, map(self._spans, blocks))

    def _spans(self, block: int) -> list[Span]:
        size = self.layout.block_bytes // self.num_parts
        return [((part * self.num_blocks + block) * size, size) for part in range(self.num_parts)]


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


ReadEnd = ReadDone | ReadBroken
TransportEvent = ReadEnd | Notification


def read_end(handle: int, error: TransportError | None) -> ReadEnd:
    return ReadDone(handle) if error is None else ReadBroken(handle, error)


def check_runs(runs: Runs, peer: AgentAddress, pool: PoolMemory) -> None:
    """Raise `TransportError` for a run outside the pool of `peer` or outside ours, `pool`."""
    theirs, ours = peer.num_bytes, pool.num_bytes
    for source, target, num_bytes in runs:
        if not 0 <= source <= theirs - num_bytes:
            raise TransportError(f"a run is outside the pool of {peer.name}")
        if not 0 <= target <= ours - num_bytes:
            raise TransportError("a run is outside our pool")


class Transport(Protocol):
    name: str  # the agent's name, unique among all agents
    busy: bool  # whether the last poll moved bytes or messages, so that the next poll should follow at once

    def register(self, pool: PoolMemory) -> None:
        """Make our pool readable for peers and a target of our reads. Called once, before all other calls."""

    def metadata(self) -> bytes:
        """For a peer's `connect`; goes into our AgentAddress."""

    def connect(self, peer: AgentAddress) -> None:
        """Prepare to read from and notify `peer`. The first use may raise or report `PeerDisconnected`."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer, connected or not. Reads from it break."""

    def start_read(self, peer: str, runs: Runs) -> int:
        """Copy runs of bytes from the peer's pool to ours. Returns a handle."""

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        """`start_read` of whole blocks, equally large in both pools. Neighbours on both sides move as one run."""

    def try_complete(self, handle: int) -> bool:
        """Whether the read completed before `start_read` returned; then `poll` does not report it."""

    def cancel(self, handle: int) -> None:
        """Break a read that has not ended."""

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a small message. While the connection lives, messages arrive once and in order."""

    def poll(self) -> list[TransportEvent]:
        """Events since the last call; never waits."""

    def close(self) -> None:
        """End all reads and connections, and deregister the memory."""
