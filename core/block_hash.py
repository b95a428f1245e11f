"""Names for the content of KV blocks.

The local hash of a full block is XXH3_64 (seed 1337) over its tokens as little-endian u32. The sequence hash of block i
is XXH3_64 over LE64(sequence hash of block i-1) || LE64(local hash of block i), so it names the block *and* everything
before it. The first block's sequence hash is its local hash, unless a salt (tenant, adapter) gives the chain another
root. Other routers of the field use the same function, so traces and block events can be compared.

A hash is a hint: the seed is public, and a second list of tokens for a given hash is found in a minute. `BlockPool`
compares the tokens themselves before a block is shared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

HASH_SEED = 1337


class FullBlock(NamedTuple):
    """Content of a full block of a sequence, without what stands before."""

    sequence_hash: int
    token_bytes: bytes  # the block's tokens as little-endian u32


def local_hash(token_bytes: bytes) -> int:
    """Hash of one full block's tokens alone, wherever the block stands."""
    return xxhash.xxh3_64_intdigest(token_bytes, seed=HASH_SEED)


def chain_hash(parent: int, local: int) -> int:
    """Sequence hash of a block whose predecessor has sequence hash `parent`."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, local), seed=HASH_SEED)


def root_hash(cache_salt: str, adapter: str = "") -> int | None:
    """The parent of the first block: None when nothing separates this request from the others."""
    if not cache_salt and not adapter:
        return None
    salted = f"{len(cache_salt)}:{cache_salt}{adapter}"
    return xxhash.xxh3_64_intdigest(salted.encode(), seed=HASH_SEED)


def extend_full_blocks(
    blocks: list[FullBlock], token_ids: Sequence[int], block_size: int, root: int | None = None
) -> None:
    """Append to `blocks` the full blocks of `token_ids` that it does not cover yet."""
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
