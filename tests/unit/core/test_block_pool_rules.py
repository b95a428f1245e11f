"""The rules of the block pool, one at a time. tests/property/test_block_pool.py tests them together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.scheduling.block_pool import BlockPool, BlockRemoved, BlockStored, Column
from tests.support.cached_blocks import match, register_prefix


def cached(pool: BlockPool, hashes: list[int]) -> list[int]:
    """Allocate blocks, register them with these hashes, and release them."""
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    register_prefix(pool, blocks, hashes)
    pool.release(blocks)
    return blocks


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    for sequence_hash in (1, 2, 3):
        cached(pool, [sequence_hash])
    used = match(pool, [1])
    pool.share(used)
    pool.release(used)
    pool.allocate(2)
    assert pool.registered_hashes() == [1]


def test_a_prefix_outlives_its_tails() -> None:
    pool = BlockPool(3)
    cached(pool, [1, 2, 3])
    pool.allocate(1)
    assert match(pool, [1, 2, 3]) == match(pool, [1, 2])
    assert len(match(pool, [1, 2])) == 2


def test_a_prefix_that_was_leased_outlives_its_tails_too() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    register_prefix(pool, blocks, [1, 2, 3])
    pool.lease(blocks)
    pool.release(blocks)
    pool.unlease(blocks)
    pool.allocate(1)
    assert match(pool, [1, 2, 3]) == blocks[:2]


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    pool = BlockPool(4)
    cached(pool, [1, 2])
    pool.allocate(2)
    assert pool.registered_hashes() == [1, 2]


def test_neighbours_are_allocated_together_after_any_order_of_releases() -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    pool.release([6, 1, 4, 0, 7, 2, 5])
    assert pool.allocate(7) == [0, 1, 2, 4, 5, 6, 7]


def test_evicted_blocks_are_allocated_in_order_among_the_free_blocks() -> None:
    pool = BlockPool(6)
    assert cached(pool, [1, 2, 3]) == [0, 1, 2]
    assert pool.allocate(3) == [3, 4, 5]
    pool.release([5, 3, 4])
    assert pool.allocate(5) == [1, 2, 3, 4, 5]  # 2 and 1 were the least recently used


def test_a_leased_block_is_not_reused_until_its_last_lease_ends() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.lease(blocks)
    pool.lease(blocks)
    pool.release(blocks)
    assert pool.ledger()[Column.LEASED] == 1
    pool.unlease(blocks)
    assert pool.allocate(1) is None
    pool.unlease(blocks)
    assert pool.allocate(1) == blocks


def test_a_shared_block_is_not_evictable_until_its_last_hold_ends() -> None:
    pool = BlockPool(1)
    block = cached(pool, [1])
    pool.share(block)
    pool.share(block)
    pool.release(block)
    assert pool.allocate(1) is None
    pool.release(block)
    assert pool.column_of(block[0]) is Column.CACHED


def test_the_prefix_cache_keeps_the_first_of_two_equal_blocks() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block in blocks:
        register_prefix(pool, [block], [7])
    assert match(pool, [7]) == blocks[:1]
    pool.release(blocks)
    assert pool.ledger()[Column.FREE] == pool.ledger()[Column.CACHED] == 1


def test_num_available_without_holds_leaves_out_shared_and_leased_blocks() -> None:
    pool = BlockPool(4)
    own, shared, leased = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    assert own is not None
    assert shared is not None
    assert leased is not None
    register_prefix(pool, shared, [1])
    pool.share(shared)
    pool.lease(leased)
    assert pool.num_available_without([]) == pool.num_available == 1
    assert pool.num_available_without([*own, *shared, *leased]) == 2, "the shared block has another holder"
    assert pool.num_available_without([*own, *shared, *shared, *leased]) == 3, "the leased block still has a reader"


def test_block_events_are_returned_once_and_in_order() -> None:
    pool = BlockPool(1)
    cached(pool, [1])
    cached(pool, [2])
    assert pool.drain_events() == [BlockStored(1), BlockRemoved(1), BlockStored(2)]
    assert pool.drain_events() == []


def test_an_invalidated_cached_block_is_free_and_reported_as_removed() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, [1, 2])
    pool.drain_events()
    pool.invalidate([blocks[0]])
    assert pool.drain_events() == [BlockRemoved(1)]
    assert pool.registered_hashes() == [2]
    assert pool.ledger() == dict.fromkeys(Column, 0) | {Column.FREE: 1, Column.CACHED: 1}
    pool.invalidate(blocks[:1])
    assert pool.drain_events() == [], "a second invalidate changes nothing"


def test_an_invalidated_held_block_stays_with_its_holders_and_no_prefix_matches_it() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    register_prefix(pool, blocks, [1])
    pool.drain_events()
    pool.invalidate(blocks)
    assert pool.drain_events() == [BlockRemoved(1)]
    assert match(pool, [1]) == []
    assert pool.column_of(blocks[0]) is Column.HELD
    pool.check()
    pool.release(blocks)
    assert pool.column_of(blocks[0]) is Column.FREE


def test_a_completed_pull_leaves_held_blocks_and_a_failed_pull_leaves_free_blocks() -> None:
    pool = BlockPool(4)
    filled, failed = pool.reserve(2), pool.reserve(1)
    assert filled is not None
    assert failed is not None
    assert pool.ledger() == dict.fromkeys(Column, 0) | {Column.FREE: 1, Column.INCOMING: 3}
    pool.arrive(filled)
    pool.cancel_reservation(failed)
    assert pool.ledger() == dict.fromkeys(Column, 0) | {Column.FREE: 2, Column.HELD: 2}
    pool.release(filled)
    assert pool.ledger()[Column.FREE] == 4, "each block was held once"
    pool.check()


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        BlockPool(num_blocks)


def test_taking_too_many_blocks_changes_nothing() -> None:
    pool = BlockPool(2)
    cached(pool, [1])
    assert pool.allocate(3) is None
    assert pool.reserve(3) is None
    assert pool.registered_hashes() == [1]
    assert pool.ledger() == dict.fromkeys(Column, 0) | {Column.FREE: 1, Column.CACHED: 1}


@pytest.mark.parametrize("wrong", ["release", "unlease", "arrive", "cancel_reservation", "lease", "share"])
def test_an_operation_on_claimed_blocks_fails_for_a_free_block(wrong: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        getattr(pool, wrong)([0])
    pool.check()


def test_the_pool_works_without_asserts() -> None:
    program = (
        "from core.scheduling.block_pool import BlockPool as P; p = P(3); "
        "print(p.allocate(2), p.allocate(1), p.allocate(1))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[0, 1] [2] None\n"
