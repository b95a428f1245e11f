"""A transport for a pool on a device, or for a pool in host memory whose peers have theirs on devices.

`core.paths.device_path` chooses a path for each peer. An underlying transport carries the notifications, and the bytes
between hosts:

    MAPPED   our device copies from the peer's pool, mapped          mapped_reads.py
    DIRECT   a second transport has registered the device's pool     plain_reads.py
    STAGED   the owner copies into its slots, we read the slots      staged_reads.py, staging_owner.py
    none     both pools are in host memory                           plain_reads.py

The underlying transport registers the slots for staging, or our pool if the pool is in host memory. Where the pool of a
peer cannot be mapped (no peer access between two GPUs, another IPC namespace), the next path carries the reads, with a
warning; lane and metrics name that path. A fleet with all pools in host memory does not need this class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from core.errors import MemoryMismatch, TransportError
from core.handoff import AgentAddress, DevicePath, PoolAccess
from core.paths import Lane, device_path
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.device.device_reads import DeviceReads
from kv_transfer.transports.device.mapped_reads import MappedReads
from kv_transfer.transports.device.plain_reads import PlainReads
from kv_transfer.transports.device.staged_reads import StagedReads
from kv_transfer.transports.device.staging_messages import (
    Ask,
    Done,
    Keepalive,
    Refused,
    Staged,
    StagingMessage,
    decode_staging,
    encode_staging,
)
from kv_transfer.transports.device.staging_owner import StagingOwner
from kv_transfer.transports.device.staging_ring import StagingRing, slot_layout
from kv_transfer.transports.host_address import machine_id
from kv_transfer.transports.process_name import own_process
from kv_transfer.transports.transport import Notification, PoolMemory, Transport, TransportEvent, check_runs

LANES = {DevicePath.MAPPED: Lane.CUDA_IPC, DevicePath.STAGED: Lane.STAGED}
CLOSE_TIMEOUT_S = 0.5  # for reads in flight
DIRECT_SUFFIX = "/direct"  # of the name of the second transport

logger = logging.getLogger(__name__)

OpenTransport = Callable[[str, bool], Transport]


class DeviceTransport:
    def __init__(
        self, name: str, open_transport: OpenTransport, paths: frozenset[DevicePath], staging_bytes: int = 1 << 27
    ) -> None:
        """`open_transport(name, on_device)` makes a transport, for a pool on a device or in host memory."""
        self.name = name
        self.busy = False
        self._open_transport = open_transport
        self._paths = paths
        self._staging_bytes = staging_bytes
        self._underlying = open_transport(name, False)
        self._direct: Transport | None = None
        self._pool: PoolMemory | None = None
        self._access = PoolAccess()
        self._machine = machine_id()
        self._plain = PlainReads(self._underlying, _unchanged, shared=True)
        self._staged: StagedReads | None = None
        self._owner: StagingOwner | None = None
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
        ring = self._register_underlying(pool)
        fields: dict[str, object] = {}
        if on_device and memory is not None and DevicePath.MAPPED in self._paths:
            fields |= self._offer_map(memory, pool)
        if on_device and DevicePath.DIRECT in self._paths:
            fields |= self._offer_direct(pool)
        if DevicePath.STAGED in self._paths:
            self._staged = StagedReads(self._underlying, memory, pool, ring, self._send)
            self._reads_by[DevicePath.STAGED] = self._staged
            if memory is not None and ring is not None:
                self._owner = StagingOwner(memory, pool, ring, self._send)
        if ring is not None:
            fields |= {"staging_base": ring.base, "slot_bytes": ring.slot_bytes, "num_slots": ring.num_slots}
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
        self._direct = direct
        self._reads_by[DevicePath.DIRECT] = PlainReads(direct, _direct_address, shared=False)
        return {"direct_metadata": direct.metadata()}

    def _register_underlying(self, pool: PoolMemory) -> StagingRing | None:
        """Register a pool in host memory, or else the slots for staging. Without staging this is the smallest ring,
        since a transport needs a pool."""
        if pool.device is None:
            self._underlying.register(pool)
            return None
        ring = StagingRing(pool.memory, self._staging_bytes if DevicePath.STAGED in self._paths else 0)
        self._underlying.register(ring.as_pool())
        return ring

    def metadata(self) -> bytes:
        return self._underlying.metadata()

    def access(self) -> PoolAccess:
        return self._access

    # ---- peers

    def lane(self, peer: str) -> Lane:
        _, path = self._peers.get(peer, (None, None))
        return Lane.UNKNOWN if path is None else LANES.get(path, Lane.UNKNOWN)

    def connect(self, peer: AgentAddress) -> None:
        self.disconnect(peer.name)
        path = self._path_to(peer, self._access)
        self._underlying.connect(_underlying_address(peer))
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
        if self._owner is not None:
            self._owner.forget(peer)
        self._underlying.disconnect(peer)

    # ---- reads

    def start_read(self, peer: str, runs: Runs) -> int:
        reads, handle = self._reads_for(peer, runs), next(self._handles)
        reads.start(handle, peer, runs)
        self._read_by[handle] = reads
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert self._pool is not None
        reads, handle = self._reads_for(peer, self._pool.block_runs(sources, targets)), next(self._handles)
        reads.start_blocks(handle, peer, tuple(sources), tuple(targets))
        self._read_by[handle] = reads
        return handle

    def _reads_for(self, peer: str, runs: Runs) -> DeviceReads:
        """The way to read from a peer. Raises `TransportError` for runs outside a pool: a device would read them."""
        address, path = self._connected(peer)
        assert self._pool is not None
        check_runs(runs, address, self._pool)
        return self._reads_by[path]

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
        events: list[TransportEvent] = []
        for event in self._underlying.poll():
            if isinstance(event, Notification):
                self._receive(event, events)
            elif self._plain.owns(event.handle):
                events.append(self._plain.on_end(event))
            else:
                assert self._staged is not None
                self._staged.on_end(event)
        if self._owner is not None:
            self._owner.poll(time.monotonic())
        for reads in self._reads_by.values():
            events += reads.poll()
        for event in events:
            if not isinstance(event, Notification):
                del self._read_by[event.handle]
        staging = self._owner is not None and self._owner.busy
        self.busy = self._underlying.busy or staging or any(reads.busy for reads in self._reads_by.values())
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

    def _send(self, peer: str, message: StagingMessage) -> None:
        self._connected(peer)
        self._underlying.notify(peer, encode_staging(message))

    def _receive(self, event: Notification, events: list[TransportEvent]) -> None:
        try:
            message = decode_staging(event.payload)
        except TransportError as error:
            logger.warning("%s: %s", event.peer, error)
            return
        match message:
            case None:
                events.append(event)
            case Ask() if self._owner is not None and event.peer in self._peers:
                self._owner.on_ask(event.peer, message, time.monotonic())
            case Done(slice_id) if self._owner is not None:
                self._owner.on_done(event.peer, slice_id)
            case Staged() | Refused() if self._staged is not None and event.peer in self._peers:
                self._staged.on_message(event.peer, message)
            case Ask() | Done() | Staged() | Refused() | Keepalive():
                return  # a Keepalive; or the peer is not connected, or this agent does not stage: no answer


def _unchanged(peer: AgentAddress) -> AgentAddress:
    return peer


def _underlying_address(peer: AgentAddress) -> AgentAddress:
    """The address that the underlying transport reads: the peer's slots, or the peer's pool in host memory."""
    access = peer.access
    if access.device is None or not access.num_slots:
        return peer
    return replace(
        peer,
        pool_base=access.staging_base,
        num_blocks=access.num_slots,
        layout=slot_layout(access.slot_bytes),
        probe_bytes=0,
        access=PoolAccess(),
    )


def _direct_address(peer: AgentAddress) -> AgentAddress:
    return replace(peer, name=peer.name + DIRECT_SUFFIX, metadata=peer.access.direct_metadata)
