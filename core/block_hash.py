"""Hashes of the content of KV blocks.

The local hash of a full block is XXH3_64 (seed 1337) over its tokens as little-endian u32. The sequence hash of block i
is XXH3_64 over LE64(sequence hash of block i-1) || LE64(local hash of block i), so it identifies the block *and* every
block before it. The sequence hash of the first block is its local hash, unless a salt (tenant, adapter) gives the chain
another root. Other routers of the field use the same function, so their traces and block events can be compared.

A hash is only a hint: the seed is public, and finding other tokens with a given hash takes a minute. `BlockPool`
compares the tokens before it shares a block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

HASH_SEED = 1337


class FullBlock(NamedTuple):
    """Content of one full block of a sequence, without the blocks before it."""

    sequence_hash: int
    token_bytes: bytes  # the block's tokens as little-endian u32


def local_hash(token_bytes: bytes) -> int:
    """Hash of the tokens of one full block, independent of its position."""
    return xxhash.xxh3_64_intdigest(token_bytes, seed=HASH_SEED)


def chain_hash(parent: int, local: int) -> int:
    """Sequence hash of a block whose predecessor has sequence hash `parent`."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, local), seed=HASH_SEED)


def root_hash(cache_salt: str, adapter: str = "") -> int | None:
    """The parent hash of the first block; None without a salt and an adapter."""
    if not cache_salt and not adapter:
        return None
    salted = f"{len(cache_salt)}:{cache_salt}{adapter}"
    return xxhash.xxh3_64_intdigest(salted.encode(), seed=HASH_SEED)


def extend_full_blocks(
    blocks: list[FullBlock], token_ids: Sequence[int], block_size: int, root: int | None = None
) -> None:
    """Append to `blocks` the full blocks of `token_ids` that are missing in it."""
    first, end = len(blocks) * block_size, len(token_ids) // block_size * block_size
    packed = struct.pack(f"<{end - first}I", *token_ids[first:end])
    parent = blocks[-1].sequence_hash if blocks else root
    for start in range(0, len(packed), 4 * block_size):
        token_bytes = packed[start : start + 4 * block_size]
        local = local_hash(token_bytes)
        parent = local if parent is None else chain_hash(parent, local)
        blocks.append(FullBlock(parent, token_bytes))


def sequence_hashes(token_ids: Sequence[int], block_size: int, root: int | None = None) -> list[int]:
    """Sequence hashes of every full block of `token_ids`, first block first."""
    blocks: list[FullBlock] = []
    extend_full_blocks(blocks, token_ids, block_size, root)
    return [block.sequence_hash for block in blocks]
