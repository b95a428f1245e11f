"""Two lists of tokens with one hash: the prefix cache tells them apart, and the first in the cache keeps the name.

The forged tokens are a second preimage of XXH3_64 with our seed, found by a four-list search in a minute.
"""

from __future__ import annotations

import struct

import pytest

from core.block_hash import FullBlock, chain_hash, extend_full_blocks, local_hash, root_hash, sequence_hashes
from core.block_pool import BlockPool, BlockRemoved, BlockStored, PrefixBlock
from core.config import SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduler import Scheduler
from core.sequence import Sequence
from core.step import SampledToken, StepOutput

BLOCK_SIZE = 16
HONEST = tuple(range(100, 116))
FORGED = (18463, 16220, 2202, 28542, 10122, 29752, 19119, 28519, 14555, 2512, 4776, 1545, 1460, 23447, 3117, 6387)
OTHER = tuple(range(200, 216))


def sequence(name: str, *blocks: tuple[int, ...], salt: str = "") -> Sequence:
    """A prompt of these blocks and one token more."""
    prompt = (*(token for block in blocks for token in block), 7)
    return Sequence(Request(name, prompt, len(prompt), SamplingParams(max_tokens=2), cache_salt=salt), arrival=0)


class Worker:
    """Runs one prompt after the other."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(SchedulerConfig(512, 8, 8), self.pool, BLOCK_SIZE, frozenset())

    def compute(self, name: str, *blocks: tuple[int, ...], salt: str = "") -> int:
        """How many of the prompt's tokens were cached."""
        computed = sequence(name, *blocks, salt=salt)
        self.scheduler.add(computed)
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.complete_step(StepOutput(plan.step_id, {name: SampledToken(9)}))
        self.pool.check()
        return computed.num_cached_tokens

    def pull(self, name: str, *blocks: tuple[int, ...]) -> int:
        """As `compute`, where the prompt's KV comes from a peer: how many tokens' blocks are not pulled."""
        pulled = sequence(name, *blocks)
        self.scheduler.hold_cached_prefix(pulled, pulled.num_tokens)
        num_skipped = len(pulled.block_table) * BLOCK_SIZE
        targets = self.pool.reserve(len(blocks) + 1 - len(pulled.block_table))
        assert targets is not None
        self.pool.arrive(targets)
        pulled.block_table += targets
        pulled.num_computed_tokens = pulled.num_tokens
        pulled.token_ids.append(9)
        self.scheduler.add(pulled)
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.complete_step(StepOutput(plan.step_id, {name: SampledToken(9)}))
        self.pool.check()
        return num_skipped


def test_the_forged_tokens_have_the_hash_of_the_honest_ones_at_every_depth() -> None:
    assert local_hash(struct.pack("<16I", *FORGED)) == local_hash(struct.pack("<16I", *HONEST))
    for before in ((), OTHER, OTHER + OTHER):
        assert sequence_hashes(before + FORGED + OTHER, BLOCK_SIZE) == sequence_hashes(
            before + HONEST + OTHER, BLOCK_SIZE
        )


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("way", ["compute", "pull"])
def test_a_forged_block_and_all_behind_are_refused(depth: int, way: str) -> None:
    worker = Worker()
    before = [tuple(range(1000 * n, 1000 * n + 16)) for n in range(1, depth + 1)]
    worker.compute("forger", *before, FORGED, OTHER, OTHER)
    assert getattr(worker, way)("honest", *before, HONEST, OTHER, OTHER) == depth * BLOCK_SIZE
    assert getattr(worker, way)("forger again", *before, FORGED, OTHER, OTHER) == (depth + 3) * BLOCK_SIZE


def test_a_forged_prompt_that_was_pulled_is_refused_too() -> None:
    worker = Worker()
    worker.pull("forger", FORGED, OTHER)
    assert worker.compute("honest", HONEST, OTHER) == 0
    assert worker.compute("forger again", FORGED, OTHER) == 2 * BLOCK_SIZE


def test_the_first_keeps_the_name_and_the_second_becomes_findable_once_the_first_is_evicted() -> None:
    worker = Worker(num_blocks=6)
    worker.compute("forger", FORGED, OTHER)
    before = worker.pool.registered_hashes()
    worker.compute("honest", HONEST, OTHER)
    assert worker.pool.registered_hashes() == before
    assert worker.compute("honest again", HONEST, OTHER) == 0
    worker.pool.release(allocated(worker.pool, 6))
    worker.compute("honest", HONEST, OTHER)
    assert worker.compute("honest again", HONEST, OTHER) == 2 * BLOCK_SIZE
    assert worker.compute("forger again", FORGED, OTHER) == 0


def test_what_is_computed_behind_the_second_is_not_found_behind_the_first() -> None:
    worker = Worker()
    worker.compute("forger", FORGED)
    worker.compute("honest", HONEST, OTHER)
    assert worker.compute("forger again", FORGED, OTHER) == BLOCK_SIZE


def test_a_block_computed_behind_a_forged_one_is_refused_behind_the_honest_one() -> None:
    """The block has the honest tokens and the honest hash, but its KV was computed from forged tokens."""
    pool = BlockPool(2)
    forged, honest = full_blocks(FORGED + OTHER), full_blocks(HONEST + OTHER)
    assert forged[1] == honest[1]
    first, behind = allocated(pool, 2)
    pool.register(behind, forged[1], pool.register(first, forged[0], ""))
    pool.release([first])
    assert allocated(pool, 1) == [first], "evicted, while the block behind is held"
    pool.register(first, honest[0], "")
    assert honest[1].sequence_hash in pool.registered_hashes()
    assert [found.block for found in pool.match_prefix(honest, "")] == [first]


def test_a_block_that_no_match_can_reach_gives_up_its_name() -> None:
    pool = BlockPool(3)
    blocks = full_blocks(HONEST + OTHER)
    first, behind, again = allocated(pool, 3)
    pool.register(behind, blocks[1], pool.register(first, blocks[0], ""))
    pool.release([first])
    assert allocated(pool, 1) == [first], "evicted, while the block behind is held"
    parent = pool.register(first, blocks[0], "")
    pool.drain_events()
    pool.register(again, blocks[1], parent)
    assert pool.drain_events() == [BlockRemoved(blocks[1].sequence_hash), BlockStored(blocks[1].sequence_hash)]
    assert [found.block for found in pool.match_prefix(blocks, "")] == [first, again]
    pool.check()


def test_behind_a_block_that_is_not_in_the_cache_nothing_is_registered() -> None:
    pool = BlockPool(4)
    blocks = full_blocks(HONEST + OTHER)
    first, second, third, _ = allocated(pool, 4)
    parent = pool.register(first, blocks[0], "")
    assert isinstance(parent, PrefixBlock)
    pool.invalidate([first])
    assert pool.register(second, blocks[1], parent) is None
    assert pool.register(third, blocks[1], None) is None
    assert pool.registered_hashes() == []


def test_a_match_never_crosses_salts_though_all_salts_have_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.sequence.root_hash", lambda _salt: 1)
    worker = Worker()
    worker.compute("mine", HONEST, OTHER, salt="mine")
    assert worker.compute("yours", HONEST, OTHER, salt="yours") == 0
    assert worker.compute("nobody's", HONEST, OTHER) == 0
    assert worker.compute("mine again", HONEST, OTHER, salt="mine") == 2 * BLOCK_SIZE


def test_a_first_block_without_salt_that_has_the_hash_of_a_salted_one_is_refused() -> None:
    pool = BlockPool(2)
    root = root_hash("tenant")
    assert root is not None
    packed = struct.pack("<16I", *HONEST)
    (block,) = allocated(pool, 1)
    full = FullBlock(chain_hash(root, local_hash(packed)), packed)
    pool.register(block, full, "tenant")
    assert pool.match_prefix([full], "") == []
    assert [found.block for found in pool.match_prefix([full], "tenant")] == [block]


def full_blocks(tokens: tuple[int, ...]) -> list[FullBlock]:
    blocks: list[FullBlock] = []
    extend_full_blocks(blocks, tokens, BLOCK_SIZE)
    return blocks


def allocated(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks
