"""Who owns each KV block: one ledger, five columns, every block in exactly one.

    FREE --allocate--> HELD --release--> FREE, or CACHED where the prefix cache knows its content
    FREE --reserve---> INCOMING --arrive--> HELD        (blocks a pull will fill)
    CACHED --share---> HELD        CACHED --evict (least recently used)--> FREE
    HELD --lease--> HELD and leased --release--> LEASED --unlease--> FREE or CACHED

A block may be held by many sequences (shared prefix) and leased to many readers; it is written only by the sequence
that allocated it, and only before it is registered or leased. HELD wins over LEASED in the ledger; a LEASED block is
one that only readers keep.

The prefix cache finds a block by its sequence hash and compares what the hash stands for: the block's tokens, and which
block of the cache, or which cache salt, stands before. So a match is an equal prefix of the same salt, also where
somebody has made another list of tokens with the same hash.

Blocks are handed out in rising order, neighbours together as far as what is held allows: a hand-off moves neighbours on
both sides as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from core.block_hash import FullBlock


class Column(Enum):
    FREE = "free"
    CACHED = "cached"  # no reader, content known, evictable
    HELD = "held"  # by at least one sequence
    LEASED = "leased"  # offered to at least one peer, held by no sequence
    INCOMING = "incoming"  # reserved for a pull

    # Of the one object that each is; Enum's own is a call of Python code, several for every move of a block.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class BlockStored:
    sequence_hash: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    sequence_hash: int


BlockEvent = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class _Claims:
    """On a block. One object stands for many blocks, so what follows for a thousand of a hand-off is found out once."""

    num_holds: int
    num_leases: int
    num_incoming: int
    column: Column  # follows from the rest; without claims, from whether the content is known


_FREE, _CACHED = _Claims(0, 0, 0, Column.FREE), _Claims(0, 0, 0, Column.CACHED)


@dataclass(slots=True, eq=False)
class PrefixBlock:
    """An entry of the prefix cache. Content that leaves and comes back gets a new entry: compare by identity."""

    block: int
    sequence_hash: int
    token_bytes: bytes
    parent: PrefixBlock | str | None  # the block before; the cache salt of a first block; None after leaving the cache


class BlockPool:
    """Blocks are named 0 .. num_blocks - 1. Nothing here touches their bytes."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, is {num_blocks}")
        self.num_blocks = num_blocks
        self._claims = [_FREE] * num_blocks
        self._known: list[PrefixBlock | None] = [None] * num_blocks  # by block: its place in the prefix cache
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, the lowest on top
        self._freed: list[int] = []  # free, too; sorted into the stack when that is used up, not one by one
        self._cached: dict[int, None] = {}  # block id -> nothing; insertion order = least recently used first
        self._by_hash: dict[int, PrefixBlock] = {}
        self._counts = dict.fromkeys(Column, 0) | {Column.FREE: num_blocks}
        self._events: list[BlockEvent] = []

    # ---- asking

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and evictable cached ones."""
        return len(self._free) + len(self._freed) + len(self._cached)

    def ledger(self) -> dict[Column, int]:
        """Number of blocks in each column; sums to `num_blocks`."""
        return dict(self._counts)

    def column_of(self, block: int) -> Column:
        return self._claims[block].column

    def num_leases(self, block: int) -> int:
        """How many peers may read this block now."""
        return self._claims[block].num_leases

    def match_prefix(self, blocks: Sequence[FullBlock], cache_salt: str) -> list[PrefixBlock]:
        """The longest cached prefix of `blocks`. `share` its blocks before anything else happens."""
        found: list[PrefixBlock] = []
        parent: PrefixBlock | str = cache_salt
        for sequence_hash, token_bytes in blocks:
            cached = self._by_hash.get(sequence_hash)
            if cached is None or cached.token_bytes != token_bytes or cached.parent != parent:
                break
            found.append(cached)
            parent = cached
        return found

    def known_hashes(self) -> list[int]:
        """Sequence hashes of all blocks whose content the prefix cache knows."""
        return list(self._by_hash)

    def num_available_without(self, holds: Iterable[int]) -> int:
        """`num_available` as it would be if these holds ended; a block held twice among them is named twice."""
        ended = Counter(holds)
        claims = ((self._claims[block], num_ended) for block, num_ended in ended.items())
        return self.num_available + sum(c.num_holds == num_ended and not c.num_leases for c, num_ended in claims)

    def drain_events(self) -> list[BlockEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---- holding

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content, HELD once; None, and nothing changed, where there are not enough."""
        blocks = self._take(count)
        self._change(blocks or (), holds=1)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match_prefix` found."""
        for block in blocks:
            assert self._known[block] is not None, f"block {block} has no known content to share"
        self._change(blocks, holds=1)

    def release(self, blocks: Sequence[int]) -> None:
        """End one hold of each. The last block goes first to the evictable end: a prefix outlives its tails."""
        self._change(reversed(blocks), holds=-1)

    def register(self, block: int, full: FullBlock, parent: PrefixBlock | str | None) -> PrefixBlock | None:
        """Make a fully computed block findable behind `parent`: the block before, or the cache salt of a first block.

        Returns the parent of the next block: the new entry, or an earlier entry of equal content. Returns None, and
        registers nothing, where the parent has left the cache or the hash names other content, which keeps the name.
        """
        assert self._claims[block].num_holds > 0, f"block {block} is not held"
        assert self._known[block] is None, f"block {block} is registered already"
        if not _in_cache(parent):
            return None
        first = self._by_hash.get(full.sequence_hash)
        if first is not None and not _in_cache(first.parent):
            self._remove(first.block)  # no match can reach a block whose parent has left
            first = None
        if first is not None:
            return first if (first.token_bytes, first.parent) == (full.token_bytes, parent) else None
        known = PrefixBlock(block, full.sequence_hash, full.token_bytes, parent)
        self._known[block] = self._by_hash[full.sequence_hash] = known
        self._events.append(BlockStored(full.sequence_hash))
        return known

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Take corrupt blocks out of the prefix cache. Sequences and readers that have them keep them."""
        for block in blocks:
            if self._known[block] is not None:
                self._remove(block)

    # ---- handing to peers

    def lease(self, blocks: Collection[int]) -> None:
        """One more peer may read these blocks; they are not reused until it is unleased."""
        for block in blocks:
            assert self._claims[block].column in (Column.HELD, Column.LEASED), f"block {block} holds nothing to offer"
        self._change(blocks, leases=1)

    def unlease(self, blocks: Sequence[int]) -> None:
        """One peer has done with these. As in `release`, the last block goes first to the evictable end."""
        self._change(reversed(blocks), leases=-1)

    # ---- taking from peers

    def reserve(self, count: int) -> list[int] | None:
        """`count` INCOMING blocks for a pull to fill; None, and nothing changed, where there are not enough."""
        blocks = self._take(count)
        self._change(blocks or (), incoming=1)
        return blocks

    def arrive(self, blocks: Iterable[int]) -> None:
        """The pull has filled and verified these: INCOMING -> HELD once, by the sequence they were reserved for."""
        self._change(blocks, incoming=-1, holds=1)

    def cancel_reservation(self, blocks: Iterable[int]) -> None:
        """The pull failed and all its reads have ended: INCOMING -> FREE."""
        self._change(blocks, incoming=-1)

    # ---- the ledger

    def _take(self, count: int) -> list[int] | None:
        """Choose `count` available blocks, evicting the least recently used content; they are FREE until changed."""
        if count > self.num_available:
            return None
        if len(self._free) < count:
            while len(self._free) + len(self._freed) < count:
                self._forget(next(iter(self._cached)))
            self._free = sorted(self._free + self._freed, reverse=True)
            self._freed = []
        return self._free[: -count - 1 : -1]

    def _forget(self, block: int) -> None:
        """CACHED -> FREE: the content may be overwritten from here on."""
        self._unregister(block)
        del self._cached[block]
        self._claims[block] = _FREE
        self._freed.append(block)
        self._counts[Column.CACHED] -= 1
        self._counts[Column.FREE] += 1

    def _remove(self, block: int) -> None:
        if block in self._cached:
            self._forget(block)
        else:
            self._unregister(block)

    def _unregister(self, block: int) -> None:
        known = self._known[block]
        assert known is not None
        self._known[block] = known.parent = None
        del self._by_hash[known.sequence_hash]
        self._events.append(BlockRemoved(known.sequence_hash))

    def _change(self, blocks: Iterable[int], *, holds: int = 0, leases: int = 0, incoming: int = 0) -> None:
        """Change the claims on each block and move it between columns; the only place that does."""
        last, claims_then = None, _FREE
        for block in blocks:
            before = self._claims[block]
            if before is not last:
                last, claims_then = before, _changed(block, before, holds, leases, incoming)
            after = claims_then if claims_then is not _FREE or self._known[block] is None else _CACHED
            self._claims[block] = after
            if before.column is after.column:
                continue
            self._counts[before.column] -= 1
            self._counts[after.column] += 1
            if before is _FREE:
                top = self._free.pop()  # outside the assert, which -O would drop with all it does
                assert top == block, f"block {block} was taken out of turn"
            elif before is _CACHED:
                del self._cached[block]
            if after is _FREE:
                self._freed.append(block)
            elif after is _CACHED:
                self._cached[block] = None

    def check(self) -> None:
        """Every block in exactly one column, every index in step with it."""
        counts = dict.fromkeys(Column, 0)
        for block, (claims, known) in enumerate(zip(self._claims, self._known, strict=True)):
            if claims.num_incoming:
                assert (claims.num_incoming, claims.num_holds, claims.num_leases, known) == (1, 0, 0, None)
            unclaimed = _FREE if known is None else _CACHED
            assert claims is unclaimed or claims == _changed(block, claims, 0, 0, 0) != _FREE, f"block {block}"
            counts[claims.column] += 1
            assert (block in self._cached) == (claims is _CACHED), f"block {block}"
            if known is not None:
                assert known.block == block, f"block {block}"
                assert self._by_hash[known.sequence_hash] is known, f"block {block}"
        assert counts == self._counts, f"{counts} counted, {self._counts} in the ledger"
        free = {*self._free, *self._freed}
        assert len(self._free) + len(self._freed) == counts[Column.FREE] == len(free)
        assert all(self._claims[block] is _FREE for block in free)
        assert self._free == sorted(self._free, reverse=True)
        assert len(self._by_hash) == sum(known is not None for known in self._known)


def _in_cache(parent: PrefixBlock | str | None) -> bool:
    return isinstance(parent, str) or (parent is not None and parent.parent is not None)


def _changed(block: int, claims: _Claims, holds: int, leases: int, incoming: int) -> _Claims:
    """`_FREE` where no claim is left, whether the content is known or not."""
    num_holds, num_leases = claims.num_holds + holds, claims.num_leases + leases
    num_incoming = claims.num_incoming + incoming
    assert num_holds >= 0, f"block {block} is not held"
    assert num_leases >= 0, f"block {block} is not leased"
    assert num_incoming >= 0, f"block {block} is not incoming"
    if num_incoming:
        column = Column.INCOMING
    elif num_holds:
        column = Column.HELD
    elif num_leases:
        column = Column.LEASED
    else:
        return _FREE
    return _Claims(num_holds, num_leases, num_incoming, column)
