"""A transport for a pool on a device, or for a pool in host memory whose peers have theirs on devices.

`core.paths.device_path` chooses a path for each peer:

    MAPPED   our device copies from the peer's pool, mapped                    mapped_reads.py
    DIRECT   a second transport has registered the pool; UCX moves the bytes   plain_reads.py
    none     both pools are in host memory                                     plain_reads.py

An underlying transport carries the notifications, and the bytes between pools in host memory. Where the pool of a peer
cannot be mapped (no peer access between two GPUs, another IPC namespace), the direct path carries the reads, with a
warning. UCX does not tell how it moves bytes of a device: by cuda_ipc, by RDMA, or staged through host memory. So the
lane of a direct path is unknown, and its speed decides (kv_transfer/protocol/path_verdict.py). A fleet with all pools
in host memory does not need this class.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from mmap import PAGESIZE, mmap

from core.errors import MemoryMismatch, TransportError
from core.handoff import AgentAddress, DevicePath, PoolAccess
from core.kv_layout import KVLayout
from core.paths import Lane, device_path
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.device.device_reads import DeviceReads
from kv_transfer.transports.device.mapped_reads import MappedReads
from kv_transfer.transports.device.plain_reads import PlainReads
from kv_transfer.transports.host_address import machine_id
from kv_transfer.transports.process_name import own_process
from kv_transfer.transports.transport import (
    Notification,
    PoolMemory,
    Transport,
    TransportEvent,
    check_blocks,
    check_runs,
)

CLOSE_TIMEOUT_S = 0.5  # for reads in flight
DIRECT_SUFFIX = "/direct"  # of the name of the second transport

logger = logging.getLogger(__name__)

OpenTransport = Callable[[str, bool], Transport]


class DeviceTransport:
    def __init__(self, name: str, open_transport: OpenTransport, paths: frozenset[DevicePath]) -> None:
        """`open_transport(name, on_device)` makes a transport. `on_device`: one of the two pools of a read is."""
        self.name = name
        self.busy = False
        self._open_transport = open_transport
        self._paths = paths
        self._underlying = open_transport(name, False)
        self._pool: PoolMemory | None = None
        self._access = PoolAccess()
        self._machine = machine_id()
        self._plain = PlainReads(self._underlying, _unchanged, shared=True)
        self._reads_by: dict[DevicePath | None, DeviceReads] = {None: self._plain}
        self._peers: dict[str, tuple[AgentAddress, DevicePath | None]] = {}
        self._read_by: dict[int, DeviceReads] = {}  # by handle
        self._handles = count()

    # ---- our pool

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        memory, on_device = pool.memory, pool.device is not None
        if on_device and memory is None:  # only another transport can reach the pool
            self._paths = frozenset({DevicePath.DIRECT})
        self._underlying.register(_notification_memory() if on_device else pool)
        fields: dict[str, object] = {}
        if on_device and memory is not None and DevicePath.MAPPED in self._paths:
            fields |= self._offer_map(memory, pool)
        if DevicePath.DIRECT in self._paths:
            fields |= self._offer_direct(pool)
        self._access = replace(PoolAccess(pool.device, self._paths & self._reads_by.keys()), **fields)  # type: ignore[arg-type]

    def _offer_map(self, memory: DeviceMemory, pool: PoolMemory) -> dict[str, object]:
        """Where the driver exports no memory (as under WSL), the agent has only the other paths, if there are any."""
        try:
            handle = memory.export()
        except TransportError as error:
            if self._paths == {DevicePath.MAPPED}:
                raise
            logger.warning("peers cannot map our pool: %s", error)
            return {}
        self._reads_by[DevicePath.MAPPED] = MappedReads(memory, pool)
        return {"map_handle": handle, "process": own_process()}

    def _offer_direct(self, pool: PoolMemory) -> dict[str, object]:
        """Where the transport cannot register memory of the device, the agent has only the other paths, if any."""
        direct = self._open_transport(self.name + DIRECT_SUFFIX, True)
        try:
            direct.register(pool)
        except TransportError as error:
            direct.close()
            unmapped = {DevicePath.MAPPED} - self._reads_by.keys()
            if not self._paths - unmapped - {DevicePath.DIRECT}:
                raise
            logger.warning("peers cannot read our pool directly: %s", error)
            return {}
        self._reads_by[DevicePath.DIRECT] = PlainReads(direct, _direct_address, shared=False)
        return {"direct_metadata": direct.metadata()}

    def metadata(self) -> bytes:
        return self._underlying.metadata()

    def access(self) -> PoolAccess:
        return self._access

    # ---- peers

    def lane(self, peer: str) -> Lane:
        _, path = self._peers.get(peer, (None, None))
        return Lane.CUDA_IPC if path is DevicePath.MAPPED else Lane.UNKNOWN

    def connect(self, peer: AgentAddress) -> None:
        self.disconnect(peer.name)
        path = self._path_to(peer, self._access)
        self._underlying.connect(peer)
        try:
            path = self._connect_reads(peer, path)
        except TransportError:
            self._underlying.disconnect(peer.name)
            raise
        self._peers[peer.name] = (peer, path)

    def _path_to(self, peer: AgentAddress, access: PoolAccess) -> DevicePath | None:
        try:
            return device_path(access, peer.access, peer.location.machine == self._machine)
        except MemoryMismatch as error:
            raise TransportError(f"{peer.name}: {error}") from error

    def _connect_reads(self, peer: AgentAddress, path: DevicePath | None) -> DevicePath | None:
        try:
            self._reads_by[path].connect(peer)
        except TransportError as error:
            if path is not DevicePath.MAPPED:
                raise
            others = replace(self._access, paths=self._access.paths - {path})
            try:
                second = self._path_to(peer, others)
            except TransportError:
                raise error from None
            logger.warning("the pool of %s cannot be mapped (%s); its path is %s", peer.name, error, second)
            return self._connect_reads(peer, second)
        return path

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        self._reads_by[known[1]].disconnect(peer)
        self._underlying.disconnect(peer)

    # ---- reads

    def start_read(self, peer: str, runs: Runs) -> int:
        address, path = self._connected(peer)
        assert self._pool is not None
        check_runs(runs, address, self._pool)  # a device would read what is outside a pool
        reads, handle = self._reads_by[path], next(self._handles)
        reads.start(handle, peer, runs)
        self._read_by[handle] = reads
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        address, path = self._connected(peer)
        assert self._pool is not None
        check_blocks(sources, targets, address, self._pool)
        reads, handle = self._reads_by[path], next(self._handles)
        reads.start_blocks(handle, peer, sources, targets)
        self._read_by[handle] = reads
        return handle

    def try_complete(self, handle: int) -> bool:
        done = self._read_by[handle].try_complete(handle)
        if done:
            del self._read_by[handle]
        return done

    def cancel(self, handle: int) -> None:
        if handle in self._read_by:
            self._read_by[handle].cancel(handle)

    # ---- notifications and events

    def notify(self, peer: str, payload: bytes) -> None:
        self._connected(peer)
        self._underlying.notify(peer, payload)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = [
            event if isinstance(event, Notification) else self._plain.on_end(event) for event in self._underlying.poll()
        ]
        for reads in self._reads_by.values():
            events += reads.poll()
        for event in events:
            if not isinstance(event, Notification):
                del self._read_by[event.handle]
        self.busy = self._underlying.busy or any(reads.busy for reads in self._reads_by.values())
        return events

    def close(self) -> None:
        """The reads end first, since no copy of a device may write into a pool that is gone."""
        for peer in list(self._peers):
            self.disconnect(peer)
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while self._read_by and time.monotonic() < give_up_at:
            self.poll()
        for reads in self._reads_by.values():
            reads.close()
        self._underlying.close()
        if self._read_by:
            raise TransportError(f"{len(self._read_by)} reads did not end within {CLOSE_TIMEOUT_S} s")

    # ---- inside

    def _connected(self, peer: str) -> tuple[AgentAddress, DevicePath | None]:
        if peer not in self._peers:
            raise TransportError(f"not connected to {peer}")
        return self._peers[peer]


def _unchanged(peer: AgentAddress) -> AgentAddress:
    return peer


def _direct_address(peer: AgentAddress) -> AgentAddress:
    """The address of the transport that has registered the pool: the second one, or that of a pool in host memory."""
    metadata = peer.access.direct_metadata
    return replace(peer, name=peer.name + DIRECT_SUFFIX, metadata=metadata) if metadata else peer


def _notification_memory() -> PoolMemory:
    """A page of host memory that nobody reads: a transport that carries notifications alone needs a pool too."""
    layout = KVLayout("notifications", "float32", 1, 1, 16, 1)
    view = memoryview(mmap(-1, PAGESIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return PoolMemory(address, PAGESIZE // layout.block_bytes, layout, view)
