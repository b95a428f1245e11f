"""The KV blocks of a worker and their owners: a ledger of five columns, with each block in exactly one column.

    FREE --allocate--> HELD --release--> FREE, or CACHED if the prefix cache has an entry for the block
    FREE --reserve---> INCOMING --arrive--> HELD        (target blocks of a pull)
    CACHED --share---> HELD        CACHED --evict (least recently used)--> FREE
    HELD --lease--> HELD and leased --release--> LEASED --unlease--> FREE or CACHED
    CACHED --lease--> LEASED                            (a peer reads a cached prefix)

Many sequences may hold a block (shared prefix), and many readers may lease it. Only the sequence that allocated a block
writes it, and only before the block is registered or leased. A block that is held and leased counts as HELD; a LEASED
block has readers only.

The prefix cache finds a block by its sequence hash. It then compares the tokens of the block, and its parent: the
preceding cached block, or the cache salt. So a match is an equal prefix with the same salt, even if an attacker forges
tokens with an equal hash.

The pool allocates blocks in rising order and keeps neighbours together where it can: a hand-off copies a run of blocks
that are neighbours in both pools at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from core.block_hash import FullBlock


class Column(Enum):
    FREE = "free"
    CACHED = "cached"  # in the prefix cache, without holder or reader; evictable
    HELD = "held"  # by at least one sequence
    LEASED = "leased"  # offered to at least one peer, held by no sequence
    INCOMING = "incoming"  # reserved for a pull

    # Each move of a block hashes its columns, and Enum.__hash__ is slow Python code.
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
    """The claims on one block. Blocks with equal claims share an instance: `_change` computes the new claims once."""

    num_holds: int
    num_leases: int
    num_incoming: int
    column: Column  # follows from the counts; without claims, CACHED if the prefix cache has an entry, else FREE


_FREE, _CACHED = _Claims(0, 0, 0, Column.FREE), _Claims(0, 0, 0, Column.CACHED)
_INCOMING = _Claims(0, 0, 1, Column.INCOMING)


@dataclass(slots=True, eq=False)
class PrefixBlock:
    """An entry of the prefix cache. Evicted content gets a new entry when it returns, so compare by identity."""

    block: int
    sequence_hash: int
    token_bytes: bytes
    parent: PrefixBlock | str | None  # the preceding block, or the cache salt of a first block; None once evicted
    stored_as: tuple[bytes, int] | None = None  # its name and position in a tier below the pool, once computed


class BlockPool:
    """Block ids are 0 .. num_blocks - 1. The pool never touches the bytes of a block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, is {num_blocks}")
        self.num_blocks = num_blocks
        self._claims = [_FREE] * num_blocks
        self._entries: list[PrefixBlock | None] = [None] * num_blocks  # block -> entry of the prefix cache
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, the lowest id on top
        self._freed: list[int] = []  # free too; sorted into the stack when the stack runs out
        self._cached: dict[int, None] = {}  # an ordered set of blocks, least recently used first
        self._by_hash: dict[int, PrefixBlock] = {}
        self._counts = dict.fromkeys(Column, 0) | {Column.FREE: num_blocks}
        self._events: list[BlockEvent] = []
        # For a tier below the pool, which takes both: registered entries; sequence hashes of corrupt blocks.
        self.news: deque[PrefixBlock] | None = None
        self.corrupt: list[int] | None = None
        self.num_changes = 0  # of claims and of the prefix cache: an equal number means an equal pool

    # ---- queries

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and evictable cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing, not even a cached prefix."""
        return len(self._free) + len(self._freed)

    def ledger(self) -> dict[Column, int]:
        """Number of blocks in each column; sums to `num_blocks`."""
        return dict(self._counts)

    def column_of(self, block: int) -> Column:
        return self._claims[block].column

    def num_leases(self, block: int) -> int:
        """The number of peers that may read this block now."""
        return self._claims[block].num_leases

    def leases(self) -> dict[int, int]:
        """The number of peers that may read each block, for blocks with at least one."""
        return {block: claims.num_leases for block, claims in enumerate(self._claims) if claims.num_leases}

    def match_prefix(self, blocks: Sequence[FullBlock], cache_salt: str) -> list[PrefixBlock]:
        """The longest cached prefix of `blocks`. Call `share` on its blocks before any other change to the pool."""
        found: list[PrefixBlock] = []
        parent: PrefixBlock | str = cache_salt
        for sequence_hash, token_bytes in blocks:
            cached = self._by_hash.get(sequence_hash)
            if cached is None or cached.token_bytes != token_bytes or cached.parent != parent:
                break
            found.append(cached)
            parent = cached
        return found

    def registered_hashes(self) -> list[int]:
        """Sequence hashes of all blocks in the prefix cache."""
        return list(self._by_hash)

    def num_available_without(self, holds: Iterable[int]) -> int:
        """`num_available` if these holds ended. List a block once for each hold."""
        ended = Counter(holds)
        claims = ((self._claims[block], num_ended) for block, num_ended in ended.items())
        return self.num_available + sum(c.num_holds == num_ended and not c.num_leases for c, num_ended in claims)

    def drain_events(self) -> list[BlockEvent]:
        """Changes of the prefix cache since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---- holds

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, HELD once each. Returns None, and changes nothing, if too few are available."""
        blocks = self._take(count)
        self._change(blocks or (), holds=1)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match_prefix` found."""
        for block in blocks:
            assert self._entries[block] is not None, f"block {block} is not in the prefix cache"
        self._change(blocks, holds=1)

    def release(self, blocks: Sequence[int]) -> None:
        """End one hold of each block. The last block is evicted first, so a prefix outlives its tails."""
        self._change(reversed(blocks), holds=-1)

    def register(self, block: int, full: FullBlock, parent: PrefixBlock | str | None) -> PrefixBlock | None:
        """Add a full, computed block to the prefix cache. `parent`: the preceding block, or the cache salt.

        Returns the parent for the next block: the new entry, or an earlier entry of equal content. Returns None, and
        registers nothing, if the parent has left the cache, or if an entry of other content has the same hash.
        """
        assert self._claims[block].num_holds > 0, f"block {block} is not held"
        assert self._entries[block] is None, f"block {block} is already registered"
        if not _in_cache(parent):
            return None
        first = self._by_hash.get(full.sequence_hash)
        if first is not None and not _in_cache(first.parent):
            self._remove(first.block)  # no match can reach a block whose parent has left
            first = None
        if first is not None:
            return first if (first.token_bytes, first.parent) == (full.token_bytes, parent) else None
        self.num_changes += 1
        entry = PrefixBlock(block, full.sequence_hash, full.token_bytes, parent)
        self._entries[block] = self._by_hash[full.sequence_hash] = entry
        self._events.append(BlockStored(full.sequence_hash))
        if self.news is not None:
            self.news.append(entry)
        return entry

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Take corrupt blocks out of the prefix cache. Their sequences and readers keep them."""
        for block in blocks:
            if (entry := self._entries[block]) is not None:
                self._remove(block)
                if self.corrupt is not None:
                    self.corrupt.append(entry.sequence_hash)

    # ---- leases: blocks that peers read

    def lease(self, blocks: Collection[int]) -> None:
        """Let one more peer read these blocks. The pool does not reuse a block before its last `unlease`."""
        for block in blocks:
            has_content = self._claims[block].column in (Column.HELD, Column.LEASED, Column.CACHED)
            assert has_content, f"block {block} has no content to lease"
        self._change(blocks, leases=1)

    def unlease(self, blocks: Sequence[int]) -> None:
        """End one peer's lease of these blocks. As in `release`, the last block is evicted first."""
        self._change(reversed(blocks), leases=-1)

    # ---- reservations: targets of a pull

    def reserve(self, count: int) -> list[int] | None:
        """Take `count` blocks, INCOMING, for a pull. Returns None, and changes nothing, if too few are available."""
        blocks = self._take(count)
        self._change(blocks or (), incoming=1)
        return blocks

    def arrive(self, blocks: Iterable[int]) -> None:
        """INCOMING -> HELD once: the pull has filled and verified these blocks for their sequence."""
        self._change(blocks, incoming=-1, holds=1)

    def cancel_reservation(self, blocks: Iterable[int]) -> None:
        """INCOMING -> FREE: the pull has failed, and all its reads have ended."""
        self._change(blocks, incoming=-1)

    # ---- the ledger

    def _take(self, count: int) -> list[int] | None:
        """Choose `count` available blocks, and evict cached blocks if needed. The result stays FREE until `_change`."""
        if count > self.num_available:
            return None
        if len(self._free) < count:
            while len(self._free) + len(self._freed) < count:
                self._evict(next(iter(self._cached)))
            self._free = sorted(self._free + self._freed, reverse=True)
            self._freed = []
        return self._free[: -count - 1 : -1]

    def _evict(self, block: int) -> None:
        """CACHED -> FREE: the content may be overwritten from now on."""
        self._unregister(block)
        del self._cached[block]
        self._claims[block] = _FREE
        self._freed.append(block)
        self._counts[Column.CACHED] -= 1
        self._counts[Column.FREE] += 1

    def _remove(self, block: int) -> None:
        if block in self._cached:
            self._evict(block)
        else:
            self._unregister(block)

    def _unregister(self, block: int) -> None:
        entry = self._entries[block]
        assert entry is not None
        self.num_changes += 1
        self._entries[block] = entry.parent = None
        del self._by_hash[entry.sequence_hash]
        self._events.append(BlockRemoved(entry.sequence_hash))

    def _change(self, blocks: Iterable[int], *, holds: int = 0, leases: int = 0, incoming: int = 0) -> None:
        """Change the claims on each block and move it between columns. No other method adds or ends a claim."""
        last, changed = None, _FREE
        self.num_changes += 1
        for block in blocks:
            before = self._claims[block]
            if before is not last:
                last, changed = before, _changed(block, before, holds, leases, incoming)
            after = changed if changed is not _FREE or self._entries[block] is None else _CACHED
            self._claims[block] = after
            if before.column is after.column:
                continue
            self._counts[before.column] -= 1
            self._counts[after.column] += 1
            if before is _FREE:
                top = self._free.pop()  # outside the assert, which -O removes
                assert top == block, f"block {block} is not on top of the free stack"
            elif before is _CACHED:
                del self._cached[block]
            if after is _FREE:
                self._freed.append(block)
            elif after is _CACHED:
                self._cached[block] = None

    def check(self) -> None:
        """Every block is in exactly one column, and every index agrees."""
        counts = dict.fromkeys(self._counts, 0)
        sound = {id(_FREE), id(_CACHED)}  # claims in the right column; blocks share them, so each is looked at once
        free, num_entries = set(), 0
        for block, (claims, entry) in enumerate(zip(self._claims, self._entries, strict=True)):
            if entry is None and claims is _FREE:
                free.add(block)
                continue
            counts[claims.column] += 1
            if entry is None:
                assert claims is not _CACHED, f"block {block}"
            else:
                num_entries += 1
                assert claims is not _FREE, f"block {block}"
                assert not claims.num_incoming, f"block {block}"
                assert (block in self._cached) == (claims is _CACHED), f"block {block}"
                assert entry.block == block, f"block {block}"
                assert self._by_hash[entry.sequence_hash] is entry, f"block {block}"
            if id(claims) not in sound:
                assert claims == _changed(block, claims, 0, 0, 0) != _FREE, f"block {block}"
                assert not claims.num_incoming or claims == _INCOMING, f"block {block}"
                sound.add(id(claims))
        counts[Column.FREE] += len(free)
        assert counts == self._counts, f"{counts} counted, {self._counts} in the ledger"
        assert len(self._free) + len(self._freed) == len(free)
        assert free == {*self._free, *self._freed}
        assert self._free == sorted(self._free, reverse=True)
        assert len(self._cached) == counts[Column.CACHED]
        assert len(self._by_hash) == num_entries


def _in_cache(parent: PrefixBlock | str | None) -> bool:
    return isinstance(parent, str) or (parent is not None and parent.parent is not None)


def _changed(block: int, claims: _Claims, holds: int, leases: int, incoming: int) -> _Claims:
    """The claims after a change. `_FREE` if no claim is left, even if the block is in the prefix cache."""
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
