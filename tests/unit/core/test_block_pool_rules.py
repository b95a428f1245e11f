"""The rules of the block pool, and who holds its blocks. tests/property/test_block_pool.py tests the rules together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.handoff import OwnerState, PullerState
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.ledger import Claim, SequenceState, check_claims, count_once
from tests.support.cached_blocks import allocated, match, register_prefix, reserved


def cached(pool: BlockPool, hashes: list[int]) -> list[int]:
    """Allocate blocks, register them with these hashes, and release them."""
    blocks = allocated(pool, len(hashes))
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


def test_a_prefix_that_was_leased_outlives_its_tails() -> None:
    pool = BlockPool(3)
    blocks = allocated(pool, 3)
    register_prefix(pool, blocks, [1, 2, 3])
    pool.lease(blocks)
    pool.release(blocks)
    pool.unlease(blocks)
    pool.allocate(1)
    assert match(pool, [1, 2, 3]) == blocks[:2]


def test_evicted_blocks_are_allocated_in_order_among_the_free_blocks() -> None:
    pool = BlockPool(6)
    assert cached(pool, [1, 2, 3]) == [0, 1, 2]
    assert pool.allocate(3) == [3, 4, 5]
    pool.release([5, 3, 4])
    assert pool.allocate(5) == [1, 2, 3, 4, 5]  # 2 and 1 were the least recently used


def test_num_available_without_holds_leaves_out_shared_and_leased_blocks() -> None:
    pool = BlockPool(4)
    own, shared, leased = (allocated(pool, 1) for _ in range(3))
    register_prefix(pool, shared, [1])
    pool.share(shared)
    pool.lease(leased)
    assert pool.num_available_without([]) == pool.num_available == 1
    assert pool.num_available_without([*own, *shared, *leased]) == 2, "the shared block has another holder"
    assert pool.num_available_without([*own, *shared, *shared, *leased]) == 3, "the leased block still has a reader"


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        BlockPool(num_blocks)


def test_the_pool_works_without_asserts() -> None:
    program = (
        "from core.scheduling.block_pool import BlockPool as P; p = P(3); "
        "print(p.allocate(2), p.allocate(1), p.allocate(1))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[0, 1] [2] None\n"


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
    assert list(counts(claims, pool).items()) == [("first", 3), ("second", 2)], "the oldest holder comes first"
    check_claims(claims, pool)


def test_a_leased_block_counts_for_its_sequence_until_that_releases_it_and_then_for_the_oldest_reader() -> None:
    pool = BlockPool(10)
    blocks = allocated(pool, 4)
    pool.lease(blocks[:3])
    sequence = Claim("sequence", SequenceState.RUNNING, blocks, since=1.0)
    offer = Claim("offer", OwnerState.OFFERED, blocks[:3], since=1.0)
    assert counts([sequence, offer], pool) == {"sequence": 4, "offer": 0}
    pool.release(blocks)
    pool.lease(blocks[:1])
    newer = Claim("newer", OwnerState.OFFERED, blocks[:1], since=2.0)
    assert counts([newer, offer], pool) == {"offer": 3, "newer": 0}, "a block with two readers counts once"
    check_claims([newer, offer], pool)


def test_the_check_finds_a_held_block_without_a_claim() -> None:
    pool = BlockPool(4)
    blocks = allocated(pool, 2)
    with pytest.raises(AssertionError, match="claimed"):
        check_claims([Claim("one", SequenceState.RUNNING, blocks[:1], since=0.0)], pool)


def test_the_targets_of_a_pull_count_as_incoming() -> None:
    pool = BlockPool(4)
    pull = Claim("pull", PullerState.WANTING, reserved(pool, 3), since=2.0)
    (holder,) = count_once([pull], pool, now=2.5)
    assert (holder.claim.column, holder.num_counted, holder.age_s) == (Column.INCOMING, 3, 0.5)
