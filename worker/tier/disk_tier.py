"""A tier below the pool: cached blocks on disk or in host memory, of one worker (docs/prefix_from_a_peer.md).

    down   a block is registered -> `write_down` holds it -> copied: released -> written: the block is here
    up     `find` -> `read` into INCOMING blocks -> PullCompleted, as from a peer (worker/prefixes.py)

Blocks go down while they are in the prefix cache, in the order of their registration, which is about the order of their
eviction. A block is held for a copy in memory only, never for the time of a disk, and only while blocks are to spare. A
block that is evicted before its turn is lost.

A read has a price: its bytes, and those before it, over the measured bandwidth. It begins only where the price is less
than the time to compute its tokens, and ends with what it has when its limit of time passes. A disk that fails or
is late costs hits: reads and writes pause, each by itself, ever longer. On a full disk, the growth of the file pauses
so, and new blocks take the slots of others. No block waits for a disk that hangs: the targets of a read that is given
up are free at once, and no other read begins before that one has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from core.block_hash import FullBlock, hash_on_disk
from core.handoff import AbortReason, PullerState, TransferId
from core.scheduling.block_pool import BlockEvent, BlockPool, Column, PrefixBlock
from core.scheduling.ledger import Claim, SequenceState
from kv_transfer.protocol.events import Actions, PullCompleted, PullFailed, PullStats
from worker.tier.events import (
    BlockRead,
    BlocksRead,
    BlocksWritten,
    BlockWrite,
    EraseSlot,
    GiveUpRead,
    ReadBlocks,
    ReadEnd,
    SlotErased,
    TierAction,
    WriteBlocks,
)
from worker.tier.names import chain_name, root_name
from worker.tier.slot_table import SlotTable

OWNER = "disk"  # of pulled prefixes and claims, where a peer has the name of its agent
MAX_WRITES = 8  # blocks of one write, which are held while they are copied; beyond: the next write
NEWS_PER_BLOCK = 4  # changes of the prefix cache that wait for a write, for each block; beyond: the oldest are lost
MAX_NEWS = 32  # new blocks that one event looks at; beyond: the next tick, at once
MAX_UNNAMED = 256  # blocks whose names are computed for a write; beyond: the block is lost
PRIOR_BYTES_PER_S = 500e6  # of a disk that nothing has been read from
FAST_PRIOR_BYTES_PER_S = 10e9  # likewise of host memory, and of any tier below a pool on a GPU; as of a path to a peer
READ_S = 0.002  # of a read, beside the time of its bytes
LATE_S = 0.05  # least time that a limit adds to twice the price; after so long without an answer, a read is given up
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0  # after a failure, doubled for each further one in a row


@dataclass(slots=True)
class _Pause:
    """Of reads, of writes, or of the growth of the file."""

    until: float = 0.0
    num_in_row: int = 0

    def fail(self, now: float) -> None:
        self.until = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.num_in_row, 16))
        self.num_in_row += 1

    def succeed(self) -> None:
        self.num_in_row = 0


@dataclass(slots=True)
class _Read:
    reads: tuple[BlockRead, ...]
    begun_at: float
    is_given_up: bool = False


@dataclass(slots=True)
class TierCounts:
    """Since the start."""

    num_written: int = 0  # blocks
    num_read: int = 0  # blocks
    num_failures: int = 0  # reads and writes that failed, were late, or found another block


class DiskTier:
    def __init__(
        self,
        pool: BlockPool,
        block_bytes: int,
        identity: bytes,
        table: SlotTable,
        prior_bytes_per_s: float = PRIOR_BYTES_PER_S,
    ) -> None:
        self.table, self.counts = table, TierCounts()
        self._pool, self._block_bytes, self._identity = pool, block_bytes, identity
        self._news: deque[PrefixBlock] = deque(maxlen=NEWS_PER_BLOCK * pool.num_blocks)
        pool.news, pool.corrupt = self._news, []
        self._to_erase: list[int] = []  # slots, since the last event
        self._given_up: list[TierAction] = []  # since the last event
        self._writes: tuple[BlockWrite, ...] = ()  # in flight
        self._pinned: list[int] = []  # their blocks, until they are copied
        self._written_since = 0.0
        self._resume_at: float | None = None
        self._reads: dict[TransferId, _Read] = {}  # in flight
        self._next_read = 0
        self._bytes_per_s = self._prior_bytes_per_s = prior_bytes_per_s
        self._measured_at = 0.0
        self._write_pause, self._read_pause, self._growth_pause = _Pause(), _Pause(), _Pause()

    # ---- down

    def write_down(self, num_spare_blocks: Callable[[], int], now: float) -> list[TierAction]:
        """Write the next registered blocks, if no write is in flight. Call it after every event."""
        erased = self._erase_corrupt()
        if now < self._write_pause.until:
            return erased
        self._resume_at = None
        if self._writes or self.table.erases:  # a write behind a hung erasure would hold its blocks
            return erased
        writes: list[BlockWrite] = []
        num_spare = num_spare_blocks()  # a block with no other holder is not available while it is copied
        num_left = MAX_NEWS
        self.table.grows = now >= self._growth_pause.until
        while self._news and num_left and len(writes) < min(MAX_WRITES, num_spare):
            num_left -= 1
            entry = self._news.popleft()
            if entry.parent is not None:
                writes += self._begin_write(entry)
        if not writes:
            self._resume_at = None if num_left else now
            return erased
        self._writes, self._written_since = tuple(writes), now
        self._pin([write.block for write in writes])
        return [*erased, WriteBlocks(self._writes)]

    def _erase_corrupt(self) -> list[TierAction]:
        """No pause, and no write in flight, keeps a corrupt block in the table."""
        corrupt = self._pool.corrupt
        if corrupt:
            self._to_erase += self.table.forget_corrupt(set(corrupt))
            corrupt.clear()
        slots, self._to_erase = self._to_erase, []
        return [EraseSlot(slot) for slot in slots]

    def on_erased(self, event: SlotErased) -> None:
        self.table.on_erased(event.slot)

    def _begin_write(self, entry: PrefixBlock) -> list[BlockWrite]:
        named = self._name(entry)
        if named is None:
            return []
        name, position, parent = named
        begun = self.table.begin(name, parent, entry.sequence_hash, position)
        return [] if begun is None else [BlockWrite(entry.block, *begun)]

    def _name(self, entry: PrefixBlock) -> tuple[bytes, int, bytes] | None:
        """Name and position of a block, and the name of its parent. None if a parent without a name was evicted."""
        unnamed = [entry]
        while isinstance(unnamed[-1].parent, PrefixBlock) and unnamed[-1].parent.stored_as is None:
            unnamed.append(unnamed[-1].parent)
            if len(unnamed) > MAX_UNNAMED:
                return None
        behind = unnamed[-1].parent
        if behind is None:
            return None
        if isinstance(behind, str):
            parent, position = root_name(self._identity, behind), -1
        else:
            assert behind.stored_as is not None
            parent, position = behind.stored_as
        name = parent
        for each in reversed(unnamed):
            parent, name, position = name, chain_name(name, each.token_bytes), position + 1
            each.stored_as = name, position
        return name, position, parent

    def _pin(self, blocks: list[int]) -> None:
        self._pinned = blocks
        self._pool.share(blocks)

    def on_copied(self) -> None:
        self._pool.release(self._pinned)
        self._pinned = []

    def on_written(self, event: BlocksWritten, now: float) -> None:
        for place, write in enumerate(self._writes):
            self._to_erase += self.table.end(write.header.name, is_written=place < event.num_written)
        self.counts.num_written += event.num_written
        if event.num_written < len(self._writes):
            self.counts.num_failures += 1
            pause = self._growth_pause if event.is_full and self.table.grows else self._write_pause
            pause.fail(now)
            self._resume_at = max(now, self._write_pause.until)
        else:
            self._write_pause.succeed()
            if self.table.grows:
                self._growth_pause.succeed()
        self._writes = ()

    # ---- up

    def find(self, blocks: Iterable[FullBlock], cache_salt: str) -> list[bytes]:
        """The names of the longest prefix of `blocks` that is here. Counts as a use of these blocks."""
        names: list[bytes] = []
        name = root_name(self._identity, cache_salt)
        for block in blocks:
            name = chain_name(name, block.token_bytes)
            if self.table.slot_of(name) is None:
                break
            names.append(name)
        self.table.use(names)
        return names

    def price_s(self, num_blocks: int) -> float:
        """Of a read, behind those in flight."""
        num_bytes = self._block_bytes * (num_blocks + sum(len(read.reads) for read in self._reads.values()))
        return READ_S + num_bytes / self._bytes_per_s

    def limit_s(self, num_blocks: int, compute_s: float, now: float) -> float | None:
        """The limit of time of a read, where computing its blocks takes `compute_s`. None: do not read."""
        if now >= self._measured_at + MAX_PAUSE_S:  # a disk that was slow is tried again: no read would measure it
            self._bytes_per_s = max(self._bytes_per_s, self._prior_bytes_per_s)
        price_s = self.price_s(num_blocks)
        is_hung = any(read.is_given_up for read in self._reads.values())
        if is_hung or price_s >= compute_s or now < self._read_pause.until:
            return None
        # As for a peer. A file that is no longer in the page cache is read several times slower than measured.
        return min(compute_s, price_s + max(price_s + LATE_S, (compute_s - price_s) / 2))

    def new_read_id(self) -> TransferId:
        self._next_read -= 1  # tickets of hand-offs are positive
        return self._next_read

    def read(
        self, read_id: TransferId, names: list[bytes], targets: list[int], limit_s: float, now: float
    ) -> ReadBlocks:
        """Read blocks of `find` into these INCOMING blocks. The worker gives the read up after `limit_s` and LATE_S."""
        reads = []
        for name, target in zip(names, targets, strict=True):
            slot = self.table.slot_of(name)
            assert slot is not None, "a name of `find` has no slot"
            reads.append(BlockRead(slot, name, target))
        self._reads[read_id] = _Read(tuple(reads), now)
        return ReadBlocks(read_id, tuple(reads), limit_s)

    def on_read(self, event: BlocksRead, now: float) -> Actions:
        read = self._reads.pop(event.read_id)
        num_bytes = event.num_read * self._block_bytes
        if num_bytes and event.seconds > 0.0:
            self._bytes_per_s += (num_bytes / event.seconds - self._bytes_per_s) / 4
            self._measured_at = now
        self.counts.num_read += event.num_read
        if event.end is ReadEnd.LOST:
            self.table.forget(read.reads[event.num_read].name)
        if event.end is ReadEnd.COMPLETE:
            self._read_pause.succeed()
        elif not (read.is_given_up and event.end is ReadEnd.LATE):  # then it has been counted, or nobody waited
            self._fail_read(event.end is not ReadEnd.LOST, now)
        if read.is_given_up:
            return []
        passed_s = now - read.begun_at
        stats = PullStats(event.num_read, num_bytes, 1, 0, passed_s, event.seconds, passed_s, OWNER)
        return [PullCompleted(event.read_id, (), stats)]

    def cancel(self, read_id: TransferId, reason: AbortReason, now: float) -> Actions:
        """Nothing waits for the read any more, and its targets are free: see `take_given_up`."""
        self._reads[read_id].is_given_up = True
        self._given_up.append(GiveUpRead(read_id))
        if reason is AbortReason.DEADLINE:
            self._fail_read(True, now)
        return [PullFailed(read_id, PullerState.CANCELLED, reason)]

    def take_given_up(self) -> list[TierAction]:
        """What stops the reads that this event has given up: before any other action, which may use their targets."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _fail_read(self, pauses: bool, now: float) -> None:
        self.counts.num_failures += 1
        if pauses:
            self._read_pause.fail(now)
            self._bytes_per_s = self._prior_bytes_per_s  # after the pause, a read is tried

    # ---- time and view

    def next_deadline(self) -> float | None:
        """When writes go on, if blocks wait for one."""
        return self._resume_at if self._news and not self._writes else None

    def load(self) -> dict[str, Any]:
        """Fields of `WorkerLoad`."""
        counts = self.counts
        return {
            "num_disk_blocks": len(self.table),
            "num_disk_reads": counts.num_read,
            "num_disk_writes": counts.num_written,
            "num_disk_failures": counts.num_failures,
            "disk_bytes_per_s": 0.0 if self._read_pause.num_in_row else self._bytes_per_s,
        }

    def hashes(self) -> list[int]:
        """As routers know the blocks here."""
        return [hash_on_disk(sequence_hash) for sequence_hash in self.table.sequence_hashes()]

    def drain_events(self) -> list[BlockEvent]:
        """Changes since the last call, in order, with such hashes."""
        return [replace(event, sequence_hash=hash_on_disk(event.sequence_hash)) for event in self.table.drain_events()]

    @property
    def reads(self) -> set[TransferId]:
        """In flight, with targets."""
        return {read_id for read_id, read in self._reads.items() if not read.is_given_up}

    def claims(self) -> list[Claim]:
        found = [
            Claim(f"{OWNER}{read_id}", PullerState.READING, [each.target for each in read.reads], read.begun_at, OWNER)
            for read_id, read in self._reads.items()
            if not read.is_given_up
        ]
        if self._pinned:
            found.append(Claim(OWNER, SequenceState.ENDING, list(self._pinned), self._written_since))
        return found

    def check(self) -> None:
        self.table.check()
        assert len(self._writes) <= MAX_WRITES
        assert not self._pinned or self._writes
        assert all(self._pool.column_of(block) is Column.HELD for block in self._pinned)
