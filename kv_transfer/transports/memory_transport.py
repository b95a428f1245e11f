"""A transport inside one process, with faults on demand.

A `MemoryFabric` connects the transports of one test. Its faults are explicit and counted in `faults_done`, so a test
proves that its fault took effect:

    fabric.fate = lambda sender, receiver, payload: ()        # drop; (0, 0) doubles; (3,) delays by 3 polls
    fabric.fail_operation(5, TransportError("..."))           # the 5th connect, read or notification from now on raises
    fabric.flip_byte_in_read(2)                               # the 2nd read from now on delivers one wrong bit
    fabric.stall_reads = True                                 # reads start and do not end
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.protocol.plan import ByteRun, Runs
from kv_transfer.transports.transport import Notification, PoolMemory, ReadEnd, TransportEvent, check_runs, read_end

Fate = Callable[[str, str, bytes], Sequence[int]]


def _arrives(_sender: str, _receiver: str, _payload: bytes) -> Sequence[int]:
    return (0,)


class MemoryFabric:
    """Connects transports of one process. Agents run on their own threads; a lock makes each operation atomic."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.transports: dict[str, MemoryTransport] = {}
        self.fate: Fate = _arrives
        self.stall_reads = False
        self.faults_done: Counter[str] = Counter()
        self._num_operations = 0
        self._num_reads = 0
        self._failures: dict[int, TransportError] = {}
        self._flips: set[int] = set()

    def fail_operation(self, nth: int, error: TransportError) -> None:
        with self.lock:
            self._failures[self._num_operations + nth] = error

    def flip_byte_in_read(self, nth: int) -> None:
        with self.lock:
            self._flips.add(self._num_reads + nth)

    # ---- called by the transports, with the lock held

    def reach(self, name: str) -> MemoryTransport:
        self._num_operations += 1
        error = self._failures.pop(self._num_operations, None)
        if error is not None:
            self.faults_done["fail"] += 1
            raise error
        if name not in self.transports:
            raise PeerDisconnected(f"{name} is gone")
        return self.transports[name]

    def copy(self, source: PoolMemory, target: PoolMemory, runs: Sequence[ByteRun]) -> None:
        assert source.view is not None
        assert target.view is not None
        for run in runs:
            piece = source.view[run.source : run.source + run.num_bytes]
            target.view[run.target : run.target + run.num_bytes] = piece
        self._num_reads += 1
        if self._num_reads in self._flips:
            target.view[runs[0].target] ^= 1
            self.faults_done["flip"] += 1


@dataclass(slots=True)
class _SentNotification:
    polls_left: int
    sender: str
    payload: bytes


@dataclass(slots=True)
class _MemoryRead:
    peer: str
    runs: Sequence[ByteRun]
    broken: TransportError | None = None


@dataclass(slots=True)
class MemoryTransport:
    name: str
    fabric: MemoryFabric
    _pool: PoolMemory | None = None
    _inbox: list[_SentNotification] = field(default_factory=list)
    _reads: dict[int, _MemoryRead] = field(default_factory=dict)
    _peers: dict[str, AgentAddress] = field(default_factory=dict)
    _handles: Iterator[int] = field(default_factory=count)
    busy: bool = False

    def register(self, pool: PoolMemory) -> None:
        assert pool.view is not None, "the memory transport copies host memory"
        self._pool = pool
        with self.fabric.lock:
            self.fabric.transports[self.name] = self

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, peer: AgentAddress) -> None:
        with self.fabric.lock:
            self.fabric.reach(peer.metadata.decode())
            self._peers[peer.name] = peer

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        for read in self._reads.values():
            if read.peer == peer:
                read.broken = PeerDisconnected(f"disconnected from {peer}")

    def start_read(self, peer: str, runs: Runs) -> int:
        with self.fabric.lock:
            self._connected(peer)
        assert self._pool is not None
        check_runs(runs, self._peers[peer], self._pool)
        handle = next(self._handles)
        self._reads[handle] = _MemoryRead(peer, [ByteRun(*run) for run in runs])
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        with self.fabric.lock:
            self._connected(peer)
        assert self._pool is not None
        return self.start_read(peer, self._pool.block_runs(self._peers[peer], sources, targets))

    def try_complete(self, handle: int) -> bool:
        assert handle in self._reads
        return False  # reads end in `poll`

    def cancel(self, handle: int) -> None:
        if handle in self._reads:
            self._reads[handle].broken = TransportError("cancelled")

    def notify(self, peer: str, payload: bytes) -> None:
        with self.fabric.lock:
            receiver = self._connected(peer)
            delays = self.fabric.fate(self.name, peer, payload)
            if tuple(delays) != (0,):
                self.fabric.faults_done["fate"] += 1
            receiver._inbox += [_SentNotification(delay, self.name, payload) for delay in delays]

    def poll(self) -> list[TransportEvent]:
        with self.fabric.lock:
            for sent in self._inbox:
                sent.polls_left -= 1
            arrived = [Notification(sent.sender, sent.payload) for sent in self._inbox if sent.polls_left < 0]
            self._inbox = [sent for sent in self._inbox if sent.polls_left >= 0]
            ended = [self._end(handle) for handle in list(self._reads)]
        return [*(event for event in ended if event is not None), *arrived]

    def close(self) -> None:
        with self.fabric.lock:
            self.fabric.transports.pop(self.name, None)
        self._reads.clear()

    def _connected(self, peer: str) -> MemoryTransport:
        if peer not in self._peers:
            raise TransportError(f"not connected to {peer}")
        return self.fabric.reach(peer)

    def _end(self, handle: int) -> ReadEnd | None:
        """Copy all runs at once; a read that stalls or breaks copies nothing."""
        read = self._reads[handle]
        source = self.fabric.transports.get(read.peer)
        if source is None and read.broken is None:
            read.broken = PeerDisconnected(f"{read.peer} is gone")
        if read.broken is None and self.fabric.stall_reads:
            self.fabric.faults_done["stall"] += 1
            return None
        del self._reads[handle]
        if read.broken is None:
            assert source is not None
            assert source._pool is not None
            assert self._pool is not None
            if max(run.source + run.num_bytes for run in read.runs) <= source._pool.num_bytes:
                self.fabric.copy(source._pool, self._pool, read.runs)
            else:  # its address says more than it has
                read.broken = TransportError(f"a run is outside the pool of {read.peer}")
        return read_end(handle, read.broken)
