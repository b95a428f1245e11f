"""PrefixCache: vLLM's block events become Tandem's hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from core.block_hash import root_hash, sequence_hashes
from core.scheduling.block_pool import BlockRemoved, BlockStored
from vllm_worker.prefix_cache import PrefixCache

TOKENS = list(range(12))
HASHES = sequence_hashes(TOKENS, 4)


def stored(hashes: list[str], tokens: list[int], parent: str | None = None, **options: Any) -> Any:
    fields = {"block_hashes": hashes, "token_ids": tokens, "parent_block_hash": parent, "block_size": 4,
              "lora_name": None, "extra_keys": None}  # fmt: skip
    return _event("BlockStored", fields | options)


def removed(*hashes: str) -> Any:
    return _event("BlockRemoved", {"block_hashes": list(hashes)})


def _event(name: str, fields: dict[str, Any]) -> Any:
    return type(name, (), fields)()


@dataclass
class _Counter:
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(4))
    number: int = 0

    def take(self, *events: Any) -> list[Any]:
        self.number += 1
        return self.cache.take(self.number, events)


def test_a_chain_of_blocks_has_the_hashes_that_routers_look_up() -> None:
    counter = _Counter()
    changes = counter.take(stored(["x", "y"], TOKENS[:8])) + counter.take(stored(["z"], TOKENS[8:], "y"))
    assert changes == list(map(BlockStored, HASHES))
    assert counter.cache.sequence_hashes == tuple(HASHES)
    assert counter.take(removed("z", "unknown")) == [BlockRemoved(HASHES[2])]


def test_two_blocks_with_one_content_count_once() -> None:
    counter = _Counter()
    assert counter.take(stored(["x"], TOKENS[:4]), stored(["x2"], TOKENS[:4])) == [BlockStored(HASHES[0])]
    assert counter.take(stored(["x"], TOKENS[:4])) == []  # told again
    assert counter.take(removed("x")) == []
    assert counter.take(removed("x2")) == [BlockRemoved(HASHES[0])]


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("adapter", ["", "red"])
def test_the_salt_of_a_tenant_and_the_adapter_are_in_the_hash(salt: str, adapter: str) -> None:
    """vLLM gives the adapter with each block, and the salt with the first one."""
    first = tuple(key for key in (adapter, salt) if key)
    keys = [first or None, (adapter,) if adapter else None]
    changes = _Counter().take(stored(["x", "y"], TOKENS[:8], lora_name=adapter or None, extra_keys=keys))
    assert changes == list(map(BlockStored, sequence_hashes(TOKENS[:8], 4, root_hash(salt, adapter))))


def test_a_gap_takes_every_hash_back_and_a_new_chain_counts_again() -> None:
    counter = _Counter()
    counter.take(stored(["x"], TOKENS[:4]))
    counter.number += 1
    assert counter.take(stored(["y"], TOKENS[4:8], "x")) == [BlockRemoved(HASHES[0])]  # its parent is not known now
    assert counter.cache.num_gaps == 1
    assert counter.take(stored(["x", "y"], TOKENS[:8])) == list(map(BlockStored, HASHES[:2]))


def test_a_cleared_cache_has_no_hash() -> None:
    counter = _Counter()
    counter.take(stored(["x"], TOKENS[:4]))
    assert counter.take(_event("AllBlocksCleared", {})) == [BlockRemoved(HASHES[0])]
    assert counter.cache.sequence_hashes == ()


def test_blocks_of_another_size_are_left_out() -> None:
    assert _Counter().take(stored(["y"], TOKENS[:8], block_size=8)) == []
