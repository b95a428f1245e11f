"""Reads through host memory, where no other path leads to a pool on a device or from one.

    runs --cut--> slices --Ask--> the owner copies a slice into its slot --Staged--> we read the slot into ours
                                     --Done to the owner--> copied up to our device --all slices--> ReadDone

Where the owner's pool is in host memory, the read needs no Ask. Where our pool is in host memory, the bytes go straight
into our pool. All reads together have at most as many slices in flight as our half of the ring has slots; the oldest
read comes first.

An owner keeps a slot for LEASE_S after its Staged, which it sent `waited_s` after our Ask arrived. So the slot was ours
until (our time of the Ask) + waited_s + LEASE_S, and a slice whose read ended later is broken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.device.device_memory import Copy, DeviceMemory
from kv_transfer.protocol.plan import ByteRun, Runs, merged
from kv_transfer.transports.device.staging_messages import (
    MAX_RUNS,
    Ask,
    Done,
    Keepalive,
    Refused,
    Staged,
    StagingMessage,
    packed,
)
from kv_transfer.transports.device.staging_owner import LEASE_S
from kv_transfer.transports.device.staging_ring import SLOTS_PER_HALF, StagingRing
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, ReadEnd, Transport, read_end

KEEPALIVE_INTERVAL_S = 0.25  # while an owner has not answered: a message to a dead owner fails

Send = Callable[[str, StagingMessage], None]


@dataclass(slots=True, eq=False)
class _SlotOwner:
    address: AgentAddress
    max_slice_bytes: int
    keepalive_at: float = 0.0  # when the next one may go out


@dataclass(slots=True, eq=False)
class _StagedRead:
    handle: int
    owner: _SlotOwner
    waiting: deque[list[ByteRun]]  # slices that have not started
    slices: set[int] = field(default_factory=set)  # numbers of the slices in flight
    broken: TransportError | None = None


@dataclass(slots=True, eq=False)
class _StagedSlice:
    """A slice in flight: asked for, then read (`reading`), then copied up (`copying`)."""

    number: int
    read: _StagedRead
    runs: list[ByteRun]
    slot: int | None  # of ours; None where our pool is in host memory
    asked_at: float
    trusted_until: float = 0.0
    reading: int | None = None  # handle of the transport
    copying: int | None = None  # handle of the device


class StagedReads:
    def __init__(
        self, transport: Transport, memory: DeviceMemory | None, pool: PoolMemory, ring: StagingRing | None, send: Send
    ) -> None:
        """`transport` has registered the ring, or without a ring the pool, and reads into it. Its user passes the ends
        of our reads to `on_end`."""
        self._transport = transport
        self._memory = memory
        self._pool = pool
        self._ring = ring
        self._send = send
        self._owners: dict[str, _SlotOwner] = {}  # by name
        self._reads: dict[int, _StagedRead] = {}  # oldest first
        self._slices: dict[int, _StagedSlice] = {}  # in flight, by number
        self._slice_of: dict[int, _StagedSlice] = {}  # by handle of the transport
        self._numbers = count()

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def connect(self, peer: AgentAddress) -> None:
        access = peer.access
        sizes = [access.slot_bytes] if access.device is not None else []
        sizes += [self._ring.slot_bytes] if self._ring is not None else []
        if not sizes or min(sizes) < 1:
            raise TransportError(f"{peer.name} names no staging slots")
        self._owners[peer.name] = _SlotOwner(peer, min(sizes))

    def disconnect(self, peer: str) -> None:
        owner = self._owners.pop(peer, None)
        if owner is not None:
            self._break_reads(owner, PeerDisconnected(f"disconnected from {peer}"))

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        owner = self._owners[peer]
        self._reads[handle] = read = _StagedRead(handle, owner, deque(_slices(runs, owner.max_slice_bytes)))
        self._start_slices()
        if read.broken is not None and not read.slices:
            del self._reads[handle]
            raise read.broken

    def start_blocks(self, handle: int, peer: str, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self.start(handle, peer, self._pool.block_runs(sources, targets))

    def try_complete(self, handle: int) -> bool:
        assert handle in self._reads
        return False  # reads end in `poll`

    def cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is not None:
            self._break(read, TransportError("cancelled"))

    def poll(self) -> list[ReadEnd]:
        for part in [part for part in self._slices.values() if part.copying is not None]:
            assert self._memory is not None
            assert part.copying is not None
            if self._memory.has_ended(part.copying):
                self._end(part)
        self._send_keepalives()
        self._start_slices()
        ended = [read for read in self._reads.values() if not read.slices and (read.broken or not read.waiting)]
        for read in ended:
            del self._reads[read.handle]
        return [read_end(read.handle, read.broken) for read in ended]

    def close(self) -> None:
        for peer in list(self._owners):
            self.disconnect(peer)

    # ---- from the owner

    def on_message(self, sender: str, message: Staged | Refused) -> None:
        part = self._slices.get(message.slice_id)
        if (
            part is None
            or part.read.owner.address.name != sender
            or part.reading is not None
            or part.copying is not None
        ):
            if part is None and isinstance(message, Staged):
                self._try_send(sender, Done(message.slice_id))  # the read was given up: the slot is free
            return
        if isinstance(message, Refused):
            self._fail(part, TransportError(f"{sender} refused to stage: {message.detail}"))
            return
        access = part.read.owner.address.access
        if message.slot >= access.num_slots or message.waited_s < 0:
            self._fail(part, TransportError(f"{sender} staged in slot {message.slot}, which it does not have"))
            return
        part.trusted_until = part.asked_at + message.waited_s + LEASE_S
        source = message.slot * access.slot_bytes
        self._start_read(part, packed([(target, size) for _, target, size in part.runs], source))

    # ---- from the transport

    def on_end(self, event: ReadEnd) -> None:
        part = self._slice_of.pop(event.handle)
        part.reading = None
        if part.trusted_until:
            self._try_send(part.read.owner.address.name, Done(part.number))
        if isinstance(event, ReadBroken):
            self._fail(part, event.error)
        elif part.trusted_until and time.monotonic() >= part.trusted_until:
            self._fail(part, TransportError("a staged slice was read after the lease of its slot"))
        elif part.slot is None or part.read.broken is not None:
            self._end(part)
        else:
            self._copy_up(part)

    # ---- inside

    def _start_slices(self) -> None:
        """Start slices of the oldest reads while there are slots."""
        for read in list(self._reads.values()):
            while read.waiting and read.broken is None:
                if self._ring is None and len(self._slices) >= SLOTS_PER_HALF:
                    return
                if self._ring is not None and not self._ring.for_reads:
                    return
                self._start_slice(read, read.waiting.popleft())

    def _start_slice(self, read: _StagedRead, runs: list[ByteRun]) -> None:
        slot = None if self._ring is None else self._ring.for_reads.popleft()
        part = _StagedSlice(next(self._numbers), read, runs, slot, time.monotonic())
        self._slices[part.number] = part
        read.slices.add(part.number)
        if read.owner.address.access.device is None:
            self._start_read(part, [(target, source, size) for source, target, size in runs])
            return
        try:
            self._send(read.owner.address.name, Ask(part.number, tuple((source, size) for source, _, size in runs)))
        except TransportError as error:
            self._fail(part, error)

    def _start_read(self, part: _StagedSlice, sources: Sequence[tuple[int, int, int]]) -> None:
        """`sources`: (first byte in our pool, first byte in the memory that the owner has registered, bytes) each."""
        peer = part.read.owner.address.name
        if part.slot is None:
            runs: Runs = [(source, target, size) for target, source, size in sources]
        else:
            assert self._ring is not None
            sizes = [(source, size) for _, source, size in sources]
            placed = packed(sizes, part.slot * self._ring.slot_bytes)
            runs = merged(placed)
        try:
            part.reading = self._transport.start_read(peer, runs)
        except TransportError as error:
            if part.trusted_until:
                self._try_send(peer, Done(part.number))
            self._fail(part, error)
            return
        self._slice_of[part.reading] = part
        if self._transport.try_complete(part.reading):
            self.on_end(ReadDone(part.reading))

    def _copy_up(self, part: _StagedSlice) -> None:
        assert self._ring is not None
        assert self._memory is not None
        assert part.slot is not None
        places = packed([(target, size) for _, target, size in part.runs], self._ring.address(part.slot))
        copies = [Copy(at, self._pool.address + target, size) for target, at, size in places]
        try:
            part.copying = self._memory.start_copies(copies)
        except TransportError as error:
            self._fail(part, error)

    def _send_keepalives(self) -> None:
        """Send a Keepalive to each owner that has left an Ask unanswered for KEEPALIVE_INTERVAL_S."""
        now = time.monotonic()
        silent = {
            part.read.owner
            for part in self._slices.values()
            if part.reading is None and part.copying is None and now >= part.asked_at + KEEPALIVE_INTERVAL_S
        }
        for owner in silent:
            if now < owner.keepalive_at:
                continue
            owner.keepalive_at = now + KEEPALIVE_INTERVAL_S
            try:
                self._send(owner.address.name, Keepalive())
            except TransportError as error:
                self._break_reads(owner, error)

    def _break_reads(self, owner: _SlotOwner, error: TransportError) -> None:
        for read in [read for read in self._reads.values() if read.owner is owner]:
            self._break(read, error)

    def _fail(self, part: _StagedSlice, error: TransportError) -> None:
        """End a slice that nothing reads or copies any more, and break its read."""
        self._end(part)
        if isinstance(error, PeerDisconnected):
            self._break_reads(part.read.owner, error)
        self._break(part.read, error)

    def _break(self, read: _StagedRead, error: TransportError) -> None:
        if read.broken is None or isinstance(error, PeerDisconnected):
            read.broken = error
        read.waiting.clear()
        for number in list(read.slices):
            part = self._slices[number]
            if part.reading is not None:
                self._transport.cancel(part.reading)
            elif part.copying is None:
                self._try_send(read.owner.address.name, Done(number))
                self._end(part)

    def _end(self, part: _StagedSlice) -> None:
        """Forget a slice and free its slot. Nothing writes into its targets or its slot any more."""
        if self._slices.pop(part.number, None) is None:
            return
        part.read.slices.discard(part.number)
        if part.slot is not None:
            assert self._ring is not None
            self._ring.for_reads.append(part.slot)

    def _try_send(self, peer: str, message: StagingMessage) -> None:
        """Send a message that may get lost: without a Done, the owner keeps the slot until its lease ends."""
        try:
            self._send(peer, message)
        except TransportError:
            return


def _slices(runs: Runs, slot_bytes: int) -> list[list[ByteRun]]:
    """Runs in the same order, cut into slices that fit into a slot."""
    slices: list[list[ByteRun]] = []
    room = 0
    for source, target, num_bytes in runs:
        while num_bytes:
            if not room or len(slices[-1]) == MAX_RUNS:
                slices.append([])
                room = slot_bytes
            size = min(room, num_bytes)
            slices[-1].append(ByteRun(source, target, size))
            source, target, num_bytes, room = source + size, target + size, num_bytes - size, room - size
    return slices
