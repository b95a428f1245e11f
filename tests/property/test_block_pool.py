"""The block pool against a model that records the claims on each block and the content written last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_hash import FullBlock
from core.scheduling.block_pool import BlockPool, BlockStored, Column, PrefixBlock

NUM_BLOCKS = 8
counts = st.integers(0, NUM_BLOCKS + 1)
picks = st.integers(0, 10_000)
# Few values, so that sequences share prefixes. Hashes are independent of tokens, as with forged blocks.
salts = st.sampled_from(["", "tenant"])
full_blocks = st.builds(FullBlock, st.integers(1, 4), st.sampled_from([b"a", b"b"]))
Prefix = tuple[str | FullBlock, ...]  # cache salt, then the blocks


class BlockPoolMachine(RuleBasedStateMachine):
    """A claim is a list of blocks, taken by one call. Content is a serial number, new for each write."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.leased: list[list[int]] = []
        self.incoming: list[list[int]] = []
        self.serial = count(1)
        self.content: dict[int, int] = {}  # block -> content written last
        self.prefixes: dict[PrefixBlock, Prefix] = {}  # of every entry that was ever registered
        self.written: dict[PrefixBlock, int] = {}  # content of the block at its registration
        self.replayed: set[int] = set()  # the cached hashes according to the events

    # ---- claims

    def claims(self, kind: str) -> Counter[int]:
        return Counter(block for blocks in getattr(self, kind) for block in blocks)

    def cached(self) -> list[PrefixBlock]:
        return [known for known in self.prefixes if known.parent is not None]

    def write(self, blocks: list[int]) -> None:
        for block in blocks:
            self.content[block] = next(self.serial)

    @rule(wanted=counts)
    def allocate(self, wanted: int) -> None:
        if (blocks := self.claim(wanted, self.pool.allocate)) is not None:
            self.write(blocks)
            self.held.append(blocks)

    @rule(wanted=counts)
    def reserve(self, wanted: int) -> None:
        if (blocks := self.claim(wanted, self.pool.reserve)) is not None:
            self.incoming.append(blocks)

    def claim(self, wanted: int, take: Callable[[int], list[int] | None]) -> list[int] | None:
        available = self.pool.num_available
        blocks = take(wanted)
        assert (blocks is None) == (wanted > available)
        if blocks is not None:
            assert len(set(blocks)) == len(blocks) == wanted
            claimed = self.claims("held") | self.claims("leased") | self.claims("incoming")
            assert not claimed.keys() & set(blocks), "allocated a block with a claim"
            assert not {cached.block for cached in self.cached()} & set(blocks)
        return blocks

    @precondition(lambda self: self.incoming)
    @rule(pick=picks, arrives=st.booleans())
    def end_a_pull(self, pick: int, arrives: bool) -> None:
        blocks = self.incoming.pop(pick % len(self.incoming))
        if arrives:
            self.write(blocks)
            self.pool.arrive(blocks)
            self.held.append(blocks)
        else:
            self.pool.cancel_reservation(blocks)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.pool.release(self.held.pop(pick % len(self.held)))

    @precondition(lambda self: any(self.held))
    @rule(pick=picks, full=full_blocks, salt=salts, parent_pick=picks)
    def register(self, pick: int, full: FullBlock, salt: str, parent_pick: int) -> None:
        known_blocks = {cached.block for cached in self.cached()}
        unknown = [block for claim in self.held for block in claim if block not in known_blocks]
        if not unknown:
            return
        block = unknown[pick % len(unknown)]
        parents: list[PrefixBlock | str] = [salt, *self.prefixes]  # some have left the cache
        parent = parents[parent_pick % len(parents)]
        has_left = isinstance(parent, PrefixBlock) and parent.parent is None
        named = [cached for cached in self.cached() if cached.sequence_hash == full.sequence_hash]
        registered = self.pool.register(block, full, parent)
        if registered is None:
            assert has_left or named, "refused without a reason"
            return
        assert not has_left
        prefix = (*(self.prefixes[parent] if isinstance(parent, PrefixBlock) else (salt,)), full)
        if registered in self.prefixes:
            assert [registered] == named
            assert self.prefixes[registered] == prefix, "an entry of other tokens"
        else:
            assert registered.block == block
            self.prefixes[registered] = prefix
            self.written[registered] = self.content[block]

    @rule(salt=salts, wanted=st.lists(full_blocks, max_size=4))
    def share_a_prefix(self, salt: str, wanted: list[FullBlock]) -> None:
        self.share(salt, wanted)

    @precondition(lambda self: self.prefixes)
    @rule(pick=picks)
    def share_a_prefix_that_was_registered(self, pick: int) -> None:
        salt, *wanted = list(self.prefixes.values())[pick % len(self.prefixes)]
        self.share(str(salt), [full for full in wanted if isinstance(full, FullBlock)])

    def share(self, salt: str, wanted: list[FullBlock]) -> None:
        found = self.pool.match_prefix(wanted, salt)
        for end, cached in enumerate(found, 1):
            assert self.prefixes[cached] == (salt, *wanted[:end]), "matched other tokens or another salt"
            assert self.written[cached] == self.content[cached.block], "read a block that was evicted"
        if len(found) < len(wanted):
            behind = [cached for cached in self.cached() if cached.parent == (found[-1] if found else salt)]
            assert (salt, *wanted[: len(found) + 1]) not in [self.prefixes[cached] for cached in behind]
        blocks = [cached.block for cached in found]
        before = self.pool.num_available
        lost = sum(self.pool.column_of(block) is Column.CACHED for block in set(blocks))
        self.pool.share(blocks)
        assert self.pool.num_available == before - lost
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(pick=picks)
    def lease(self, pick: int) -> None:
        blocks = self.held[pick % len(self.held)]
        self.pool.lease(blocks)
        self.leased.append(list(blocks))

    @precondition(lambda self: self.leased)
    @rule(pick=picks)
    def unlease(self, pick: int) -> None:
        self.pool.unlease(self.leased.pop(pick % len(self.leased)))

    @precondition(lambda self: self.cached())
    @rule(pick=picks)
    def invalidate(self, pick: int) -> None:
        cached = self.cached()[pick % len(self.cached())]
        self.pool.invalidate([cached.block])
        assert cached not in self.cached()
        assert cached.sequence_hash not in self.pool.registered_hashes()

    # ---- invariants

    @invariant()
    def the_ledger_balances(self) -> None:
        self.pool.check()
        ledger = self.pool.ledger()
        held, leased, incoming = (self.claims(kind) for kind in ("held", "leased", "incoming"))
        assert sum(ledger.values()) == NUM_BLOCKS
        assert ledger[Column.HELD] == len(held)
        assert ledger[Column.LEASED] == len(leased.keys() - held.keys())
        assert ledger[Column.INCOMING] == len(incoming)
        assert self.pool.num_available == ledger[Column.FREE] + ledger[Column.CACHED]
        assert all(number == 1 for number in incoming.values()), "a block has two owners"
        assert not incoming.keys() & (held.keys() | leased.keys())

    @invariant()
    def the_events_give_the_cached_hashes(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                assert event.sequence_hash not in self.replayed
                self.replayed.add(event.sequence_hash)
            else:
                self.replayed.remove(event.sequence_hash)
        assert self.replayed == set(self.pool.registered_hashes())

    def teardown(self) -> None:
        for blocks in self.incoming:
            self.pool.cancel_reservation(blocks)
        for blocks in self.held:
            self.pool.release(blocks)
        for blocks in self.leased:
            self.pool.unlease(blocks)
        self.pool.check()
        assert self.pool.num_available == NUM_BLOCKS


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=60)
