"""Names for the content of KV blocks.

The local hash of a full block is XXH3_64 (seed 1337) over its tokens as little-endian u32. The sequence hash of block i
is XXH3_64 over LE64(sequence hash of block i-1) || LE64(local hash of block i), so it names the block *and* everything
before it: equal sequence hashes mean an equal prefix. The first block's sequence hash is its local hash, unless a salt
(tenant, adapter) gives the chain another root. Other routers of the field use the same function, so traces and block
events can be compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

HASH_SEED = 1337


def local_hash(token_ids: Sequence[int]) -> int:
    """Hash of one full block's tokens alone, wherever it stands."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}I", *token_ids), seed=HASH_SEED)


def chain_hash(parent: int, local: int) -> int:
    """Sequence hash of a block whose predecessor has sequence hash `parent`."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, local), seed=HASH_SEED)


def root_hash(cache_salt: str, adapter: str = "") -> int | None:
    """The parent of the first block: None when nothing separates this request from the others."""
    if not cache_salt and not adapter:
        return None
    salted = f"{len(cache_salt)}:{cache_salt}{adapter}"
    return xxhash.xxh3_64_intdigest(salted.encode(), seed=HASH_SEED)


def extend_hashes(hashes: list[int], token_ids: Sequence[int], block_size: int, root: int | None = None) -> None:
    """Append to `hashes` the sequence hashes of the full blocks of `token_ids` that it does not cover yet."""
    for index in range(len(hashes), len(token_ids) // block_size):
        local = local_hash(token_ids[index * block_size : (index + 1) * block_size])
        parent = hashes[-1] if hashes else root
        hashes.append(local if parent is None else chain_hash(parent, local))


def sequence_hashes(token_ids: Sequence[int], block_size: int, root: int | None = None) -> list[int]:
    """Sequence hashes of every full block of `token_ids`, first block first."""
    hashes: list[int] = []
    extend_hashes(hashes, token_ids, block_size, root)
    return hashes
