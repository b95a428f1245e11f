"""Reads from a peer's pool on a device of the same machine: map the pool once, and let our device copy.

    connect --map--> runs become copies between addresses --one kernel--> has_ended --> ReadDone

- No copy in flight can be withdrawn: a cancelled read continues, and ends as broken.
- A peer's pool is unmapped once no copy from the pool is in flight.
- A map outlives the process that exported it, and keeps the memory of that process's GPU. So `poll` looks for peers
  that have died, where their processes are visible. It breaks their reads and unmaps their pools.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.process_name import has_died
from kv_transfer.transports.transport import PoolMemory, ReadEnd, read_end

CHECK_INTERVAL_S = 0.25  # between two looks for peers that have died

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _MappedPool:
    peer: AgentAddress
    base: int  # where the pool is mapped here
    gone: str = ""  # why the peer is gone; its pool is unmapped


@dataclass(slots=True)
class _MappedRead:
    source: _MappedPool
    copy: int
    broken: TransportError | None = None


class MappedReads:
    def __init__(self, memory: DeviceMemory, pool: PoolMemory) -> None:
        self._memory = memory
        self._pool = pool
        self._mapped: dict[str, _MappedPool] = {}  # by the peer's name
        self._leaving: list[_MappedPool] = []  # to be unmapped once no copy from them is in flight
        self._reads: dict[int, _MappedRead] = {}
        self._check_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def connect(self, peer: AgentAddress) -> None:
        for left in self._leaving:
            if left.peer.name == peer.name and not left.gone:  # the name holds the incarnation: the same pool
                self._leaving.remove(left)
                self._mapped[peer.name] = left
                return
        self._mapped[peer.name] = _MappedPool(peer, self._memory.map(peer.access.map_handle))

    def disconnect(self, peer: str) -> None:
        mapped = self._mapped.pop(peer, None)
        if mapped is None or mapped.gone:
            return
        self._break_reads(mapped, f"disconnected from {peer}")
        self._leaving.append(mapped)
        self._unmap_left()

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        self._start(handle, peer, np.array(runs, np.int64).reshape(-1, 3))

    def start_blocks(self, handle: int, peer: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """A row for each block: the kernel is about as fast as with merged runs, which take Python longer."""
        copies = np.empty((len(sources), 3), np.int64)
        copies[:, 0], copies[:, 1], copies[:, 2] = sources, targets, 1
        self._start(handle, peer, copies * self._pool.layout.block_bytes)

    def _start(self, handle: int, peer: str, copies: npt.NDArray[np.int64]) -> None:
        """`copies` has offsets from block 0 of each pool."""
        mapped = self._mapped[peer]
        if mapped.gone:
            raise PeerDisconnected(f"{peer} is gone: {mapped.gone}")
        copies += (mapped.base, self._pool.address, 0)
        self._reads[handle] = _MappedRead(mapped, self._memory.start_copies(copies))

    def try_complete(self, handle: int) -> bool:
        read = self._reads[handle]
        if read.broken is not None or not self._memory.has_ended(read.copy):
            return False
        del self._reads[handle]
        return True

    def cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is not None and read.broken is None:
            read.broken = TransportError("cancelled")

    def poll(self) -> list[ReadEnd]:
        self._drop_dead_peers()
        ends: list[ReadEnd] = []
        for handle, read in list(self._reads.items()):
            if not self._memory.has_ended(read.copy):
                break  # copies end in the order of their start
            del self._reads[handle]
            ends.append(read_end(handle, read.broken))
        if self._leaving and ends:
            self._unmap_left()
        return ends

    def close(self) -> None:
        for peer in list(self._mapped):
            self.disconnect(peer)
        self._unmap_left()

    # ---- inside

    def _drop_dead_peers(self) -> None:
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + CHECK_INTERVAL_S
        for name, mapped in list(self._mapped.items()):
            if not mapped.gone and has_died(mapped.peer.access.process):
                logger.info("%s has died; its pool is unmapped", name)
                mapped.gone = "its process has died"
                self._break_reads(mapped, mapped.gone)
                self._leaving.append(mapped)
        self._unmap_left()

    def _break_reads(self, source: _MappedPool, why: str) -> None:
        for read in self._reads.values():
            if read.source is source and not isinstance(read.broken, PeerDisconnected):
                read.broken = PeerDisconnected(f"{source.peer.name}: {why}")

    def _unmap_left(self) -> None:
        reading = {id(read.source) for read in self._reads.values()}
        for mapped in [mapped for mapped in self._leaving if id(mapped) not in reading]:
            self._leaving.remove(mapped)
            try:
                self._memory.unmap(mapped.base)
            except TransportError as error:
                logger.warning("the pool of %s stays mapped: %s", mapped.peer.name, error)
