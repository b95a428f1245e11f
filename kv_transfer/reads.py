"""Reads in flight: each StartRead of the machine is cut into slices, read, and hashed while its bytes are in the cache.

    StartRead --slices--> transport --done--> digests of the slice --all done--> ended, with a digest for each pair
                              `--broken, cancelled--> no more slices --none in flight--> ended, with an error

With digests, a slice is about as large as a core's second-level cache: hashing bytes that were just copied costs a
third of hashing them from memory. Over shared memory a read copies before its start returns, so each slice is done at
once; reads then take turns, a slice each, or a block that a paused sequence waits for would wait for a long prompt of
another. Other lanes have a few slices in flight, so that they move bytes during the hashing; with many, a slice would
leave the cache before its hash. Without digests, and where a device hashes its own memory, a read is one slice.

`Reads` runs on the agent's thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.errors import PeerDisconnected, TransportError
from core.handoff import AbortReason
from kv_transfer.protocol.digests import Digests, of_pieces
from kv_transfer.protocol.events import ReadFailed, ReadFinished, StartRead
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.transports.transport import PoolMemory, Transport

SLICE_BYTES = 1 << 21
MAX_SLICES_IN_FLIGHT = 4  # slices of a read in flight; beyond: they wait

Slice = tuple[int, int]  # first pair of the read, and end


@dataclass(slots=True, eq=False)
class Read:
    action: StartRead
    plan: TransferPlan
    began_at: float
    slices: deque[Slice]  # not started
    digests: list[int]  # by pair; filled in as slices end
    in_flight: dict[int, Slice] = field(default_factory=dict)  # by the transport's handle
    error: TransportError | None = None
    timed_out: str = ""  # the detail of its ReadTimedOut

    @property
    def deadline(self) -> float:
        return self.began_at + self.action.timeout_s

    @property
    def peer_is_gone(self) -> bool:
        return isinstance(self.error, PeerDisconnected)

    def result(self, seconds: float) -> ReadFinished | ReadFailed:
        """The result of a read that has ended and took `seconds`."""
        if self.error is None:
            return ReadFinished(self.action.read_id, tuple(self.digests), seconds)
        reason = AbortReason.PEER_LOST if self.peer_is_gone else AbortReason.READ_FAILED
        return ReadFailed(self.action.read_id, reason, self.timed_out or str(self.error))


class Reads:
    """The call that ends a read returns it, once. Afterwards nothing writes into its targets."""

    def __init__(self, pool: PoolMemory, verify_digests: bool) -> None:
        self._pool = pool
        self._view = pool.view if verify_digests else None
        self._memory = pool.memory if verify_digests and pool.view is None else None
        self._block_bytes = pool.layout.block_bytes
        self._read_of: dict[int, Read] = {}  # by handle
        self._in_turn: deque[Read] = deque()  # with no slice in flight, and others to start

    def __bool__(self) -> bool:
        return bool(self._read_of or self._in_turn)

    @property
    def has_turns(self) -> bool:
        return bool(self._in_turn)

    def take_turn(self, transport: Transport) -> Read | None:
        """Go on with the read that has waited longest, if there is one."""
        return self._start_slices(transport, self._in_turn.popleft()) if self._in_turn else None

    def lose(self, peer: str) -> None:
        """The connection has ended: reads in turn read nothing more, and end at their turns."""
        for read in self._in_turn:
            if read.action.peer == peer and read.error is None:
                read.error = TransportError(f"{peer} was disconnected")

    def start(self, transport: Transport, action: StartRead, plan: TransferPlan, began_at: float) -> Read | None:
        num_pairs = len(action.sources)
        by_device = self._memory is not None and not action.pieces
        digests = [0] * num_pairs if self._view is not None or by_device else []
        size = max(1, SLICE_BYTES // plan.piece_bytes) if self._view is not None else num_pairs
        slices = deque((first, min(first + size, num_pairs)) for first in range(0, num_pairs, size))
        return self._start_slices(transport, Read(action, plan, began_at, slices, digests))

    def on_done(self, transport: Transport, handle: int) -> Read | None:
        read = self._read_of.pop(handle)
        self._hash(read, read.in_flight.pop(handle))
        return self._start_slices(transport, read)

    def on_broken(self, transport: Transport, handle: int, error: TransportError) -> Read | None:
        read = self._read_of.pop(handle)
        del read.in_flight[handle]
        self._break(transport, read, error)
        return self._start_slices(transport, read)

    def time_out(self, transport: Transport, now: float) -> list[Read]:
        """Cancel late reads. They end when the transport reports their end. Returns each late read once."""
        reads = dict.fromkeys((*self._read_of.values(), *self._in_turn))
        late = [read for read in reads if now >= read.deadline and not read.timed_out]
        for read in late:
            read.timed_out = f"a read did not end within {read.action.timeout_s:.1f} s"
            self._break(transport, read, TransportError(read.timed_out))
        return late

    # ---- inside

    def _start_slices(self, transport: Transport, read: Read) -> Read | None:
        """Start slices while there is room, up to one that is done at once. Returns the read if all have ended."""
        while read.error is None and read.slices and len(read.in_flight) < MAX_SLICES_IN_FLIGHT:
            part = read.slices.popleft()
            try:
                handle = _start(transport, read, *part)
            except TransportError as error:
                self._break(transport, read, error)
                break
            if transport.try_complete(handle):
                self._hash(read, part)
                if read.slices and not read.in_flight:
                    self._in_turn.append(read)
                    return None
                continue
            read.in_flight[handle] = part
            self._read_of[handle] = read
        return None if read.in_flight else read

    def _hash(self, read: Read, part: Slice) -> None:
        first, end = part
        if read.digests and read.error is None:
            read.digests[first:end] = self._digests_of(read, first, end)

    def _digests_of(self, read: Read, first: int, end: int) -> Digests:
        """Digests of the targets of pairs [first, end)."""
        targets = read.action.targets[first:end]
        if self._memory is not None:
            return self._memory.digests(targets, self._block_bytes)
        assert self._view is not None
        if not read.action.pieces:
            return self._pool.digests(targets)
        moved = zip(read.action.pieces[first:end], targets, strict=True)
        return of_pieces(self._view, (read.plan.target_spans(piece, target) for piece, target in moved))

    def _break(self, transport: Transport, read: Read, error: TransportError) -> None:
        if read.error is None or isinstance(error, PeerDisconnected):
            read.error = error
        for handle in read.in_flight:
            transport.cancel(handle)


def _start(transport: Transport, read: Read, first: int, end: int) -> int:
    """Start to read pairs [first, end). Returns the transport's handle."""
    action = read.action
    sources, targets = action.sources[first:end], action.targets[first:end]
    if not action.pieces:
        return transport.start_block_read(action.peer, sources, targets)
    pieces = zip(action.pieces[first:end], sources, targets, strict=True)
    return transport.start_read(action.peer, read.plan.runs_of_pieces(pieces))
