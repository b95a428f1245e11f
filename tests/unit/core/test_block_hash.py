"""Hashes of block content: published vectors, chains and salts."""

from __future__ import annotations

import struct

import pytest
import xxhash

from core.block_hash import (
    HASH_SEED,
    FullBlock,
    chain_hash,
    extend_full_blocks,
    local_hash,
    root_hash,
    sequence_hashes,
)

TOKENS = list(range(1, 13))
VECTORS = [14643705804678351452, 4945711292740353085, 12583592247330656132]


def test_the_hashes_equal_those_of_other_routers() -> None:
    assert sequence_hashes(TOKENS, 4) == VECTORS
    assert local_hash(struct.pack("<4I", 1, 2, 3, 4)) == VECTORS[0]


def test_a_sequence_hash_covers_the_parent_then_the_local_hash_in_little_endian() -> None:
    local = local_hash(struct.pack("<4I", 5, 6, 7, 8))
    packed = struct.pack("<Q", VECTORS[0]) + struct.pack("<Q", local)
    assert chain_hash(VECTORS[0], local) == VECTORS[1]
    assert xxhash.xxh3_64_intdigest(packed, seed=HASH_SEED) == VECTORS[1]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_are_hashed(num_tokens: int, num_blocks: int) -> None:
    assert sequence_hashes(TOKENS[:num_tokens], 4) == VECTORS[:num_blocks]


def test_extending_a_list_token_by_token_gives_the_same_hashes() -> None:
    blocks: list[FullBlock] = []
    for end in range(len(TOKENS) + 1):
        extend_full_blocks(blocks, TOKENS[:end], 4)
    assert [block.sequence_hash for block in blocks] == VECTORS
    assert b"".join(block.token_bytes for block in blocks) == struct.pack("<12I", *TOKENS)


def test_a_sequence_hash_depends_on_the_blocks_before() -> None:
    elsewhere = sequence_hashes([9, 9, 9, 9, 5, 6, 7, 8], 4)
    assert elsewhere[1] != VECTORS[1]


def test_salts_and_adapters_separate_every_block() -> None:
    roots = [root_hash(*salts) for salts in (("a",), ("b",), ("", "a"), ("a", "b"), ("ab",), ("", "ab"))]
    assert len(set(roots)) == len(roots)
    chains = [sequence_hashes(TOKENS, 4, root) for root in [None, *roots]]
    hashes = [sequence_hash for chain in chains for sequence_hash in chain]
    assert len(set(hashes)) == len(hashes)


def test_without_salt_and_adapter_the_chain_has_no_root() -> None:
    assert root_hash("") is None
    assert root_hash("", "") is None


def test_a_salt_always_gives_the_same_hashes() -> None:
    assert sequence_hashes(TOKENS, 4, root_hash("tenant")) == sequence_hashes(TOKENS, 4, root_hash("tenant"))
    assert root_hash("tenant") == xxhash.xxh3_64_intdigest(b"6:tenant", seed=HASH_SEED)
