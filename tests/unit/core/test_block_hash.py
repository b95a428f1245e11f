"""Hashes of block content: published vectors, chains and salts."""

from __future__ import annotations

import struct

import xxhash

from core.block_hash import HASH_SEED, FullBlock, extend_full_blocks, local_hash, root_hash, sequence_hashes

TOKENS = list(range(1, 13))
VECTORS = [14643705804678351452, 4945711292740353085, 12583592247330656132]


def test_the_hashes_equal_those_of_other_routers() -> None:
    assert sequence_hashes(TOKENS, 4) == VECTORS
    assert local_hash(struct.pack("<4I", 1, 2, 3, 4)) == VECTORS[0]


def test_extending_a_list_token_by_token_gives_the_same_hashes() -> None:
    blocks: list[FullBlock] = []
    for end in range(len(TOKENS) + 1):
        extend_full_blocks(blocks, TOKENS[:end], 4)
    assert [block.sequence_hash for block in blocks] == VECTORS
    assert b"".join(block.token_bytes for block in blocks) == struct.pack("<12I", *TOKENS)


def test_salts_and_adapters_separate_every_block() -> None:
    roots = [root_hash(*salts) for salts in (("a",), ("b",), ("", "a"), ("a", "b"), ("ab",), ("", "ab"))]
    assert len(set(roots)) == len(roots)
    chains = [sequence_hashes(TOKENS, 4, root) for root in [None, *roots]]
    hashes = [sequence_hash for chain in chains for sequence_hash in chain]
    assert len(set(hashes)) == len(hashes)


def test_a_salt_always_gives_the_same_hashes() -> None:
    assert sequence_hashes(TOKENS, 4, root_hash("tenant")) == sequence_hashes(TOKENS, 4, root_hash("tenant"))
    assert root_hash("tenant") == xxhash.xxh3_64_intdigest(b"6:tenant", seed=HASH_SEED)
