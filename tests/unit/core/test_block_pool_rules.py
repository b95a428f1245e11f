"""The rules of the block pool, one at a time. tests/property/test_block_pool.py tests them together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.scheduling.block_pool import BlockPool
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


def test_a_prefix_that_was_leased_outlives_its_tails() -> None:
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
