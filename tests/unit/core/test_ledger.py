"""The holders of blocks: each block counts for one holder, so that the counts add up to the ledger."""

from __future__ import annotations

import pytest

from core.handoff import OwnerState, PullerState
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.ledger import Claim, SequenceState, check_claims, count_once
from tests.support.cached_blocks import register_prefix


def allocated(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def counts(claims: list[Claim], pool: BlockPool) -> dict[str, int]:
    return {holder.claim.name: holder.num_counted for holder in count_once(claims, pool, 100.0)}


def test_a_shared_prefix_counts_for_the_oldest_sequence() -> None:
    pool = BlockPool(10)
    first = allocated(pool, 3)
    register_prefix(pool, first, [1, 2, 3])
    pool.share(first[:2])
    second = [*first[:2], *allocated(pool, 2)]
    claims = [
        Claim("second", SequenceState.RUNNING, second, since=9.0),
        Claim("first", SequenceState.RUNNING, first, since=5.0),
    ]
    assert counts(claims, pool) == {"first": 3, "second": 2}
    check_claims(claims, pool)


def test_a_held_and_leased_block_counts_for_the_sequence_until_it_is_released() -> None:
    pool = BlockPool(10)
    blocks = allocated(pool, 4)
    pool.lease(blocks[:3])
    sequence = Claim("sequence", SequenceState.RUNNING, blocks, since=1.0)
    offer = Claim("offer", OwnerState.OFFERED, blocks[:3], since=1.0)
    assert counts([sequence, offer], pool) == {"sequence": 4, "offer": 0}
    pool.release(blocks)
    assert counts([offer], pool) == {"offer": 3}
    check_claims([offer], pool)


def test_a_block_with_two_readers_counts_once() -> None:
    pool = BlockPool(4)
    (block,) = allocated(pool, 1)
    pool.lease([block])
    pool.lease([block])
    pool.release([block])
    readers = [Claim(name, OwnerState.OFFERED, [block], since) for name, since in (("old", 1.0), ("new", 2.0))]
    assert counts(readers, pool) == {"old": 1, "new": 0}


def test_the_oldest_holder_comes_first() -> None:
    pool = BlockPool(4)
    claims = [Claim(name, SequenceState.WAITING, [], since) for name, since in (("b", 3.0), ("a", 1.0), ("c", 7.0))]
    assert [holder.claim.name for holder in count_once(claims, pool, 8.0)] == ["a", "b", "c"]


def test_the_check_finds_a_held_block_without_a_claim() -> None:
    pool = BlockPool(4)
    blocks = allocated(pool, 2)
    with pytest.raises(AssertionError, match="claimed"):
        check_claims([Claim("one", SequenceState.RUNNING, blocks[:1], since=0.0)], pool)


def test_the_targets_of_a_pull_count_as_incoming() -> None:
    pool = BlockPool(4)
    targets = pool.reserve(3)
    assert targets is not None
    pull = Claim("pull", PullerState.WANTING, targets, since=2.0)
    (holder,) = count_once([pull], pool, now=2.5)
    assert (holder.claim.column, holder.num_counted, holder.age_s) == (Column.INCOMING, 3, 0.5)
