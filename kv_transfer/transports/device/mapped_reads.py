"""Reads from a peer's pool on a device of the same machine: map the pool once, and let our device copy.

    connect --map--> runs become copies between addresses --one kernel--> has_ended --> ReadDone

- A copy in flight cannot be withdrawn: a cancelled read goes on, and ends as broken.
- A peer's pool is unmapped once no copy from it is in flight.
- A map outlives the process that exported it, and keeps its GPU's memory. So the death of a peer is looked for, where
  its process can be seen: reads then break, and the pool is unmapped although nobody has disconnected.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.device.device_memory import Copy, DeviceMemory
from kv_transfer.protocol.plan import Runs, runs_of_blocks
from kv_transfer.transports.device_reads import ReadEnd
from kv_transfer.transports.process_name import has_died
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone

LOOK_INTERVAL_S = 0.25  # for peers that have died

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    address: AgentAddress
    base: int  # of its pool, mapped here
    gone: str = ""  # why; its pool is unmapped


@dataclass(slots=True)
class _Read:
    peer: _Peer
    copy: int
    broken: TransportError | None = None


class MappedReads:
    def __init__(self, memory: DeviceMemory, pool: PoolMemory) -> None:
        self._memory = memory
        self._pool = pool
        self._peers: dict[str, _Peer] = {}
        self._leaving: list[_Peer] = []  # to be unmapped once no copy from them is in flight
        self._reads: dict[int, _Read] = {}
        self._look_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def connect(self, peer: AgentAddress) -> None:
        for known in self._leaving:
            if known.address.name == peer.name and not known.gone:  # the name holds the incarnation: the same pool
                self._leaving.remove(known)
                self._peers[peer.name] = known
                return
        self._peers[peer.name] = _Peer(peer, self._memory.map(peer.access.map_handle))

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None or known.gone:
            return
        self._break_reads(known, f"disconnected from {peer}")
        self._leaving.append(known)
        self._unmap_left()

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        known = self._peers[peer]
        if known.gone:
            raise PeerDisconnected(f"{peer} is gone: {known.gone}")
        ours, theirs = self._pool.address, known.base
        copies = [Copy(theirs + source, ours + target, num_bytes) for source, target, num_bytes in runs]
        self._reads[handle] = _Read(known, self._memory.start_copies(copies))

    def start_blocks(self, handle: int, peer: str, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        pairs = zip(sources, targets, strict=True)
        self.start(handle, peer, runs_of_blocks(pairs, self._pool.layout.block_bytes))

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
        self._look_for_deaths()
        ends: list[ReadEnd] = []
        for handle, read in list(self._reads.items()):
            if not self._memory.has_ended(read.copy):
                break  # copies end in the order of their start
            del self._reads[handle]
            ends.append(ReadDone(handle) if read.broken is None else ReadBroken(handle, read.broken))
        if self._leaving and ends:
            self._unmap_left()
        return ends

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._unmap_left()

    # ---- inside

    def _look_for_deaths(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_INTERVAL_S
        for name, peer in list(self._peers.items()):
            if not peer.gone and has_died(peer.address.access.process):
                logger.info("%s has died; its pool is unmapped", name)
                peer.gone = "its process has died"
                self._break_reads(peer, peer.gone)
                self._leaving.append(peer)
        self._unmap_left()

    def _break_reads(self, peer: _Peer, why: str) -> None:
        for read in self._reads.values():
            if read.peer is peer and not isinstance(read.broken, PeerDisconnected):
                read.broken = PeerDisconnected(f"{peer.address.name}: {why}")

    def _unmap_left(self) -> None:
        reading = {id(read.peer) for read in self._reads.values()}
        for peer in [peer for peer in self._leaving if id(peer) not in reading]:
            self._leaving.remove(peer)
            try:
                self._memory.unmap(peer.base)
            except TransportError as error:
                logger.warning("the pool of %s stays mapped: %s", peer.address.name, error)
