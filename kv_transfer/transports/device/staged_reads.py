"""Reads through host memory, where no other path leads to a pool on a device or from one.

    runs --cut--> slices --Ask--> the owner copies a slice into its slot --Staged--> we read it into our slot
                                     --Done to the owner--> copied up to our device --all slices--> ReadDone

Where the owner's pool is in host memory, the read needs no Ask. Where our pool is in host memory, the bytes go straight
into it. As many slices are on their way as our half of the ring has slots, over all reads, oldest read first.

An owner keeps a slot for LEASE_S after its Staged, which it sent `waited_s` after our Ask arrived. So the slot was ours
until (our time of the Ask) + waited_s + LEASE_S, and a slice whose read ended later is broken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.device.device_memory import Copy, DeviceMemory
from kv_transfer.protocol.plan import Run, Runs, merged, runs_of_blocks
from kv_transfer.transports.device.staging_messages import (
    MAX_RUNS,
    Ask,
    Done,
    Hello,
    Refused,
    Staged,
    StagingMessage,
    packed,
)
from kv_transfer.transports.device.staging_owner import LEASE_S
from kv_transfer.transports.device.staging_ring import SLOTS_PER_HALF, StagingRing
from kv_transfer.transports.device_reads import ReadEnd
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, Transport

HELLO_INTERVAL_S = 0.25  # while an owner has not answered: a message to a dead owner fails

Send = Callable[[str, StagingMessage], None]


@dataclass(slots=True, eq=False)
class _Peer:
    address: AgentAddress
    base: int  # of its slots; 0 for a pool in host memory, which is read as it is
    slot_bytes: int  # the largest slice
    hello_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Read:
    handle: int
    peer: _Peer
    waiting: deque[list[Run]]  # slices that have not begun
    slices: set[int] = field(default_factory=set)  # that have begun and not ended
    broken: TransportError | None = None


@dataclass(slots=True, eq=False)
class _Slice:
    """On its way: asked for, or read (`reading`), or copied up (`copying`)."""

    number: int
    read: _Read
    runs: list[Run]
    slot: int | None  # of ours; None where our pool is in host memory
    asked_at: float
    trusted_until: float = 0.0
    reading: int | None = None  # handle of the transport beneath
    copying: int | None = None  # handle of the device


class StagedReads:
    def __init__(
        self, beneath: Transport, memory: DeviceMemory | None, pool: PoolMemory, ring: StagingRing | None, send: Send
    ) -> None:
        """`beneath` has registered the ring, or without a ring the pool, and reads into it; its owner passes the ends
        of our reads to `on_end`."""
        self._beneath = beneath
        self._memory = memory
        self._pool = pool
        self._ring = ring
        self._send = send
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}  # oldest first
        self._slices: dict[int, _Slice] = {}
        self._slice_of: dict[int, _Slice] = {}  # by the handle beneath
        self._next_slice = 0

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def connect(self, peer: AgentAddress) -> None:
        access = peer.access
        sizes = [access.slot_bytes] if access.device is not None else []
        sizes += [self._ring.slot_bytes] if self._ring is not None else []
        if not sizes or min(sizes) < 1:
            raise TransportError(f"{peer.name} names no staging slots")
        self._peers[peer.name] = _Peer(peer, access.staging_base, min(sizes))

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._lose(known, PeerDisconnected(f"disconnected from {peer}"))

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        known = self._peers[peer]
        self._reads[handle] = read = _Read(handle, known, deque(_slices(runs, known.slot_bytes)))
        self._begin_slices()
        if read.broken is not None and not read.slices:
            del self._reads[handle]
            raise read.broken

    def start_blocks(self, handle: int, peer: str, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        pairs = zip(sources, targets, strict=True)
        self.start(handle, peer, runs_of_blocks(pairs, self._pool.layout.block_bytes))

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
        self._greet()
        self._begin_slices()
        ended = [read for read in self._reads.values() if not read.slices and (read.broken or not read.waiting)]
        for read in ended:
            del self._reads[read.handle]
        return [
            ReadDone(read.handle) if read.broken is None else ReadBroken(read.handle, read.broken) for read in ended
        ]

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)

    # ---- from the owner

    def on_message(self, sender: str, message: Staged | Refused) -> None:
        part = self._slices.get(message.slice_id)
        if (
            part is None
            or part.read.peer.address.name != sender
            or part.reading is not None
            or part.copying is not None
        ):
            if part is None and isinstance(message, Staged):
                self._try_send(sender, Done(message.slice_id))  # given up meanwhile: the slot is free
            return
        if isinstance(message, Refused):
            self._fail(part, TransportError(f"{sender} refused to stage: {message.detail}"))
            return
        peer = part.read.peer
        if message.slot >= peer.address.access.num_slots or message.waited_s < 0:
            self._fail(part, TransportError(f"{sender} staged in slot {message.slot}, which it does not have"))
            return
        part.trusted_until = part.asked_at + message.waited_s + LEASE_S
        source = message.slot * peer.address.access.slot_bytes
        self._start_read(part, packed([(target, size) for _, target, size in part.runs], source))

    # ---- from the transport beneath

    def owns(self, beneath: int) -> bool:
        return beneath in self._slice_of

    def on_end(self, event: ReadEnd) -> None:
        part = self._slice_of.pop(event.handle)
        part.reading = None
        if part.trusted_until:
            self._try_send(part.read.peer.address.name, Done(part.number))
        if isinstance(event, ReadBroken):
            self._fail(part, event.error)
        elif part.trusted_until and time.monotonic() >= part.trusted_until:
            self._fail(part, TransportError("a staged slice was read after the lease of its slot"))
        elif part.slot is None or part.read.broken is not None:
            self._end(part)
        else:
            self._copy_up(part)

    # ---- inside

    def _begin_slices(self) -> None:
        """Begin slices of the oldest reads while there are slots."""
        for read in list(self._reads.values()):
            while read.waiting and read.broken is None:
                if self._ring is None and len(self._slices) >= SLOTS_PER_HALF:
                    return
                if self._ring is not None and not self._ring.for_reads:
                    return
                self._begin(read, read.waiting.popleft())

    def _begin(self, read: _Read, runs: list[Run]) -> None:
        slot = None if self._ring is None else self._ring.for_reads.popleft()
        part = _Slice(self._next_slice, read, runs, slot, time.monotonic())
        self._next_slice += 1
        self._slices[part.number] = part
        read.slices.add(part.number)
        if read.peer.address.access.device is None:
            self._start_read(part, [(target, source, size) for source, target, size in runs])
            return
        try:
            self._send(read.peer.address.name, Ask(part.number, tuple((source, size) for source, _, size in runs)))
        except TransportError as error:
            self._fail(part, error)

    def _start_read(self, part: _Slice, sources: Sequence[tuple[int, int, int]]) -> None:
        """`sources`: (first byte in our pool, first byte in what the owner has registered, bytes), in order."""
        peer = part.read.peer.address.name
        if part.slot is None:
            runs: Runs = [(source, target, size) for target, source, size in sources]
        else:
            assert self._ring is not None
            sizes = [(source, size) for _, source, size in sources]
            placed = packed(sizes, part.slot * self._ring.slot_bytes)
            runs = merged(placed)
        try:
            part.reading = self._beneath.start_read(peer, runs)
        except TransportError as error:
            if part.trusted_until:
                self._try_send(peer, Done(part.number))
            self._fail(part, error)
            return
        self._slice_of[part.reading] = part
        if self._beneath.try_complete(part.reading):
            self.on_end(ReadDone(part.reading))

    def _copy_up(self, part: _Slice) -> None:
        assert self._ring is not None
        assert self._memory is not None
        assert part.slot is not None
        places = packed([(target, size) for _, target, size in part.runs], self._ring.address(part.slot))
        copies = [Copy(at, self._pool.address + target, size) for target, at, size in places]
        try:
            part.copying = self._memory.start_copies(copies)
        except TransportError as error:
            self._fail(part, error)

    def _greet(self) -> None:
        """Send a Hello to owners that have not answered for a while."""
        now = time.monotonic()
        silent = {
            part.read.peer
            for part in self._slices.values()
            if part.reading is None and part.copying is None and now >= part.asked_at + HELLO_INTERVAL_S
        }
        for peer in silent:
            if now < peer.hello_at:
                continue
            peer.hello_at = now + HELLO_INTERVAL_S
            try:
                self._send(peer.address.name, Hello())
            except TransportError as error:
                self._lose(peer, error)

    def _lose(self, peer: _Peer, error: TransportError) -> None:
        for read in [read for read in self._reads.values() if read.peer is peer]:
            self._break(read, error)

    def _fail(self, part: _Slice, error: TransportError) -> None:
        """The slice is not on its way any more."""
        self._end(part)
        if isinstance(error, PeerDisconnected):
            self._lose(part.read.peer, error)
        self._break(part.read, error)

    def _break(self, read: _Read, error: TransportError) -> None:
        if read.broken is None or isinstance(error, PeerDisconnected):
            read.broken = error
        read.waiting.clear()
        for number in list(read.slices):
            part = self._slices[number]
            if part.reading is not None:
                self._beneath.cancel(part.reading)
            elif part.copying is None:
                self._try_send(read.peer.address.name, Done(number))
                self._end(part)

    def _end(self, part: _Slice) -> None:
        """Nothing writes into its targets or its slot any more."""
        if self._slices.pop(part.number, None) is None:
            return
        part.read.slices.discard(part.number)
        if part.slot is not None:
            assert self._ring is not None
            self._ring.for_reads.append(part.slot)

    def _try_send(self, peer: str, message: StagingMessage) -> None:
        """A lost Done costs a slot its lease."""
        try:
            self._send(peer, message)
        except TransportError:
            return


def _slices(runs: Runs, slot_bytes: int) -> list[list[Run]]:
    """Runs in the same order, cut into slices that fit into a slot."""
    slices: list[list[Run]] = []
    room = 0
    for source, target, num_bytes in runs:
        while num_bytes:
            if not room or len(slices[-1]) == MAX_RUNS:
                slices.append([])
                room = slot_bytes
            size = min(room, num_bytes)
            slices[-1].append(Run(source, target, size))
            source, target, num_bytes, room = source + size, target + size, num_bytes - size, room - size
    return slices
