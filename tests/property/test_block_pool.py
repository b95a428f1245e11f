"""The block pool against a model that remembers, for every block, who claims it and what was last written into it."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_pool import BlockPool, BlockStored, Column

NUM_BLOCKS = 8
counts = st.integers(0, NUM_BLOCKS + 1)
picks = st.integers(0, 10_000)
hashes = st.integers(1, 12)


class BlockPoolMachine(RuleBasedStateMachine):
    """A claim is a list of blocks taken together. Content is a serial number, new with every write."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.leased: list[list[int]] = []
        self.incoming: list[list[int]] = []
        self.serial = count(1)
        self.content: dict[int, int] = {}  # block -> what was written last
        self.named: dict[int, tuple[int, int]] = {}  # hash -> (block, content when it was registered)
        self.replayed: set[int] = set()  # hashes, as a router hears of them

    # ---- claims

    def claims(self, kind: str) -> Counter[int]:
        return Counter(block for blocks in getattr(self, kind) for block in blocks)

    def write(self, blocks: list[int]) -> None:
        for block in blocks:
            self.content[block] = next(self.serial)

    def assert_fresh(self, blocks: list[int], wanted: int) -> None:
        assert len(set(blocks)) == len(blocks) == wanted
        claimed = self.claims("held") | self.claims("leased") | self.claims("incoming")
        assert not claimed.keys() & set(blocks), "handed out a block that somebody claims"
        assert not {self.pool.match_prefix([h])[0] for h in self.pool.known_hashes()} & set(blocks)

    @rule(wanted=counts)
    def allocate(self, wanted: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(wanted)
        assert (blocks is None) == (wanted > available)
        if blocks is not None:
            self.assert_fresh(blocks, wanted)
            self.write(blocks)
            self.held.append(blocks)

    @rule(wanted=counts)
    def reserve(self, wanted: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.reserve(wanted)
        assert (blocks is None) == (wanted > available)
        if blocks is not None:
            self.assert_fresh(blocks, wanted)
            self.incoming.append(blocks)

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
    @rule(pick=picks, sequence_hash=hashes)
    def register(self, pick: int, sequence_hash: int) -> None:
        blocks = [block for claim in self.held for block in claim]
        block = blocks[pick % len(blocks)]
        named_already = {b for h in self.pool.known_hashes() for b in self.pool.match_prefix([h])}
        known_already = sequence_hash in self.pool.known_hashes()
        self.pool.register(block, sequence_hash)
        if known_already or block in named_already:
            return
        self.named[sequence_hash] = (block, self.content[block])

    @rule(wanted=st.lists(hashes, max_size=5))
    def share_a_prefix(self, wanted: list[int]) -> None:
        blocks = self.pool.match_prefix(wanted)
        for sequence_hash, block in zip(wanted, blocks, strict=False):
            assert self.named[sequence_hash] == (block, self.content[block]), "read a block that was evicted"
        if len(blocks) < len(wanted):
            assert wanted[len(blocks)] not in self.pool.known_hashes()
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

    @precondition(lambda self: self.named)
    @rule(pick=picks)
    def distrust(self, pick: int) -> None:
        known = self.pool.known_hashes()
        if known:
            sequence_hash = known[pick % len(known)]
            (block,) = self.pool.match_prefix([sequence_hash])
            self.pool.distrust([block])
            assert self.pool.match_prefix([sequence_hash]) == []

    # ---- laws

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

    @invariant()
    def no_block_has_two_owners(self) -> None:
        incoming = self.claims("incoming")
        assert all(number == 1 for number in incoming.values())
        assert not incoming.keys() & (self.claims("held").keys() | self.claims("leased").keys())

    @invariant()
    def who_replays_the_events_knows_the_cache(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                assert event.sequence_hash not in self.replayed
                self.replayed.add(event.sequence_hash)
            else:
                self.replayed.remove(event.sequence_hash)
        assert self.replayed == set(self.pool.known_hashes())

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
TestBlockPool.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=150, stateful_step_count=60
)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks)
