"""Two lists of tokens with equal hashes: the prefix cache tells them apart, and keeps the first.

The forged tokens are a second preimage of XXH3_64 with our seed. A four-list search found them in a minute.
"""

from __future__ import annotations

import struct
from itertools import chain

import pytest

from core.block_hash import FullBlock, extend_full_blocks, local_hash, sequence_hashes
from core.scheduling.block_pool import BlockPool, BlockRemoved, BlockStored
from tests.support.cached_blocks import allocated
from tests.unit.core.driving_scheduler import Driven

BLOCK_SIZE = 16
HONEST = tuple(range(100, 116))
FORGED = (18463, 16220, 2202, 28542, 10122, 29752, 19119, 28519, 14555, 2512, 4776, 1545, 1460, 23447, 3117, 6387)
OTHER = tuple(range(200, 216))


class Worker(Driven):
    """Runs one prompt at a time. A prompt is some blocks and one more token."""

    def __init__(self, num_blocks: int = 32) -> None:
        super().__init__(num_blocks, budget=512, block_size=BLOCK_SIZE)

    def compute(self, name: str, *blocks: tuple[int, ...], salt: str = "") -> int:
        """Compute a prompt. Returns the number of its cached tokens."""
        computed = self.add(name, (*chain(*blocks), 7), max_tokens=2, salt=salt)
        self.run_until_idle()
        return computed.num_cached_tokens

    def pull(self, name: str, *blocks: tuple[int, ...]) -> int:
        """Compute a prompt with KV from a peer. Returns the number of cached tokens, which are not pulled."""
        pulled = self.add_pulled(name, (*chain(*blocks), 7), max_tokens=2)
        self.run_until_idle()
        return pulled.num_cached_tokens


def test_the_forged_tokens_have_the_hash_of_the_honest_tokens_at_every_depth() -> None:
    assert local_hash(struct.pack("<16I", *FORGED)) == local_hash(struct.pack("<16I", *HONEST))
    for before in ((), OTHER, OTHER + OTHER):
        forged, honest = (sequence_hashes(before + tokens + OTHER, BLOCK_SIZE) for tokens in (FORGED, HONEST))
        assert forged == honest


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("way", ["compute", "pull"])
def test_a_forged_block_and_the_blocks_behind_it_do_not_match(depth: int, way: str) -> None:
    worker = Worker()
    before = [tuple(range(1000 * n, 1000 * n + 16)) for n in range(1, depth + 1)]
    worker.compute("forger", *before, FORGED, OTHER, OTHER)
    assert getattr(worker, way)("honest", *before, HONEST, OTHER, OTHER) == depth * BLOCK_SIZE
    assert getattr(worker, way)("forger again", *before, FORGED, OTHER, OTHER) == (depth + 3) * BLOCK_SIZE


def test_a_block_that_no_match_can_reach_is_replaced() -> None:
    pool = BlockPool(3)
    blocks: list[FullBlock] = []
    extend_full_blocks(blocks, HONEST + OTHER, BLOCK_SIZE)
    first, behind, again = allocated(pool, 3)
    pool.register(behind, blocks[1], pool.register(first, blocks[0], ""))
    pool.release([first])
    assert allocated(pool, 1) == [first], "evicted while the block behind is held"
    parent = pool.register(first, blocks[0], "")
    pool.drain_events()
    pool.register(again, blocks[1], parent)
    assert pool.drain_events() == [BlockRemoved(blocks[1].sequence_hash), BlockStored(blocks[1].sequence_hash)]
    assert [found.block for found in pool.match_prefix(blocks, "")] == [first, again]
    pool.check()
