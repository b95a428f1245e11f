"""A transport for a pool on a device, or for a pool in host memory whose peers have theirs on devices.

It chooses a path for each peer (`core.paths.device_path`) and lets another transport carry notifications and the bytes
between hosts:

    MAPPED   our device copies from the peer's pool, mapped          mapped_reads.py
    DIRECT   a second transport has registered the device's pool     plain_reads.py
    STAGED   the owner copies into its slots, we read the slots      staged_reads.py, staging_owner.py
    none     both pools are in host memory                           plain_reads.py

The transport beneath registers the slots for staging, or our pool where it is in host memory. Where the pool of a peer
cannot be mapped (no peer access between two GPUs, another IPC namespace), the next path is taken, with a warning; lane
and metrics name it. A fleet whose pools are all in host memory does without this class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from core.errors import MemoryMismatch, TransportError
from core.handoff import AgentAddress, DevicePath, PoolAccess
from core.paths import Lane, device_path
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.device.mapped_reads import MappedReads
from kv_transfer.transports.device.staged_reads import StagedReads
from kv_transfer.transports.device.staging_messages import (
    Ask,
    Done,
    Hello,
    Refused,
    Staged,
    StagingMessage,
    decode_staging,
    encode_staging,
)
from kv_transfer.transports.device.staging_owner import StagingOwner
from kv_transfer.transports.device.staging_ring import StagingRing, slot_layout
from kv_transfer.transports.device_reads import DeviceReads
from kv_transfer.transports.host_address import machine_id
from kv_transfer.transports.plain_reads import PlainReads
from kv_transfer.transports.process_name import own_process
from kv_transfer.transports.transport import Notification, PoolMemory, Transport, TransportEvent

LANES = {DevicePath.MAPPED: Lane.CUDA_IPC, DevicePath.STAGED: Lane.STAGED}
CLOSE_TIMEOUT_S = 0.5  # for reads in flight
DIRECT_SUFFIX = "/direct"  # of the name of the second transport

logger = logging.getLogger(__name__)

OpenBeneath = Callable[[str, bool], Transport]


class DeviceTransport:
    def __init__(
        self, name: str, open_beneath: OpenBeneath, paths: frozenset[DevicePath], staging_bytes: int = 1 << 27
    ) -> None:
        """`open_beneath(name, on_device)` makes a transport, for a pool on a device or in host memory."""
        self.name = name
        self.busy = False
        self._open_beneath = open_beneath
        self._paths = paths
        self._staging_bytes = staging_bytes
        self._beneath = open_beneath(name, False)
        self._direct: Transport | None = None
        self._pool: PoolMemory | None = None
        self._access = PoolAccess()
        self._machine = machine_id()
        self._plain = PlainReads(self._beneath, _as_it_is, shared=True)
        self._staged: StagedReads | None = None
        self._owner: StagingOwner | None = None
        self._reads_by: dict[DevicePath | None, DeviceReads] = {None: self._plain}
        self._peers: dict[str, tuple[AgentAddress, DevicePath | None]] = {}
        self._read_by: dict[int, DeviceReads] = {}  # by handle
        self._next_handle = 0

    # ---- our pool

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        memory, on_device = pool.memory, pool.device is not None
        if on_device and memory is None:  # no code of ours reaches the device: the transport beneath must
            self._paths = frozenset({DevicePath.DIRECT})
        ring = self._register_beneath(pool)
        fields: dict[str, object] = {}
        if on_device and memory is not None and DevicePath.MAPPED in self._paths:
            fields |= self._offer_map(memory, pool)
        if on_device and DevicePath.DIRECT in self._paths:
            self._direct = self._open_beneath(self.name + DIRECT_SUFFIX, True)
            self._direct.register(pool)
            self._reads_by[DevicePath.DIRECT] = PlainReads(self._direct, _direct_address, shared=False)
            fields["direct_metadata"] = self._direct.metadata()
        if DevicePath.STAGED in self._paths:
            self._staged = StagedReads(self._beneath, memory, pool, ring, self._send)
            self._reads_by[DevicePath.STAGED] = self._staged
            if memory is not None and ring is not None:
                self._owner = StagingOwner(memory, pool, ring, self._send)
        if ring is not None:
            fields |= {"staging_base": ring.base, "slot_bytes": ring.slot_bytes, "num_slots": ring.num_slots}
        self._access = replace(PoolAccess(pool.device, self._paths & self._reads_by.keys()), **fields)  # type: ignore[arg-type]

    def _offer_map(self, memory: DeviceMemory, pool: PoolMemory) -> dict[str, object]:
        """Where the driver exports no memory (as under WSL), the other paths remain, if there are any."""
        try:
            handle = memory.export()
        except TransportError as error:
            if self._paths == {DevicePath.MAPPED}:
                raise
            logger.warning("peers cannot map our pool: %s", error)
            return {}
        self._reads_by[DevicePath.MAPPED] = MappedReads(memory, pool)
        return {"map_handle": handle, "process": own_process()}

    def _register_beneath(self, pool: PoolMemory) -> StagingRing | None:
        """The slots for staging; without staging the smallest ring, since a transport needs a pool to register."""
        if pool.device is None:
            self._beneath.register(pool)
            return None
        ring = StagingRing(pool.memory, self._staging_bytes if DevicePath.STAGED in self._paths else 0)
        self._beneath.register(ring.as_pool())
        return ring

    def metadata(self) -> bytes:
        return self._beneath.metadata()

    def access(self) -> PoolAccess:
        return self._access

    # ---- peers

    def lane(self, peer: str) -> Lane:
        _, path = self._peers.get(peer, (None, None))
        return Lane.UNKNOWN if path is None else LANES.get(path, Lane.UNKNOWN)

    def connect(self, peer: AgentAddress) -> None:
        self.disconnect(peer.name)
        path = self._path_to(peer, self._access)
        self._beneath.connect(_address_beneath(peer))
        try:
            path = self._connect_reads(peer, path)
        except TransportError:
            self._beneath.disconnect(peer.name)
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
        self._beneath.disconnect(peer)

    # ---- reads

    def start_read(self, peer: str, runs: Runs) -> int:
        reads = self._begin(peer, runs)
        return self._began(reads, lambda handle: reads.start(handle, peer, runs))

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert self._pool is not None
        size = self._pool.layout.block_bytes
        reads = self._begin(peer, [(s * size, t * size, size) for s, t in zip(sources, targets, strict=True)])
        return self._began(reads, lambda handle: reads.start_blocks(handle, peer, tuple(sources), tuple(targets)))

    def _begin(self, peer: str, runs: Runs) -> DeviceReads:
        """The way to read from a peer. Raises `TransportError` for runs outside a pool: a device would read them."""
        address, path = self._connected(peer)
        assert self._pool is not None
        ours = self._pool.num_bytes
        theirs = address.num_blocks * address.layout.block_bytes + address.probe_bytes
        for source, target, num_bytes in runs:
            if not 0 <= source <= theirs - num_bytes:
                raise TransportError(f"a run is outside the pool of {peer}")
            if not 0 <= target <= ours - num_bytes:
                raise TransportError("a run is outside our pool")
        return self._reads_by[path]

    def _began(self, reads: DeviceReads, start: Callable[[int], None]) -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        start(handle)
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
        self._beneath.notify(peer, payload)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        for event in self._beneath.poll():
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
        self.busy = self._beneath.busy or staging or any(reads.busy for reads in self._reads_by.values())
        return events

    def close(self) -> None:
        """Reads end first: no copy of a device may write into a pool that is gone."""
        for peer in list(self._peers):
            self.disconnect(peer)
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while self._read_by and time.monotonic() < give_up_at:
            self.poll()
        for reads in self._reads_by.values():
            reads.close()
        self._beneath.close()
        if self._read_by:
            raise TransportError(f"{len(self._read_by)} reads did not end within {CLOSE_TIMEOUT_S} s")

    # ---- inside

    def _connected(self, peer: str) -> tuple[AgentAddress, DevicePath | None]:
        if peer not in self._peers:
            raise TransportError(f"not connected to {peer}")
        return self._peers[peer]

    def _send(self, peer: str, message: StagingMessage) -> None:
        self._connected(peer)
        self._beneath.notify(peer, encode_staging(message))

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
            case Ask() | Done() | Staged() | Refused() | Hello():
                return  # of a peer that is not connected any more, or asked for the wrong thing: it asks in vain


def _as_it_is(peer: AgentAddress) -> AgentAddress:
    return peer


def _address_beneath(peer: AgentAddress) -> AgentAddress:
    """The address that the transport beneath reads: the peer's slots, or its pool where that is in host memory."""
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
