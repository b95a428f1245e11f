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
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

HASH_SEED = 1337
_DISK_MEDIUM = 0x6469736B_6469736B

U32 = "I"  # the type code of `array` for 4 bytes without sign, as on every platform of CPython
_chain_input = struct.Struct("<QQ").pack
_digest = xxhash.xxh3_64_intdigest


class FullBlock(NamedTuple):
    """Content of one full block of a sequence, without the blocks before it."""

    sequence_hash: int
    token_bytes: bytes  # the block's tokens as little-endian u32


def local_hash(token_bytes: bytes) -> int:
    """Hash of the tokens of one full block, independent of its position."""
    return _digest(token_bytes, HASH_SEED)


def chain_hash(parent: int, local: int) -> int:
    """Sequence hash of a block whose predecessor has sequence hash `parent`."""
    return _digest(_chain_input(parent, local), HASH_SEED)


def hash_on_disk(sequence_hash: int) -> int:
    """The hash under which a worker reports a block on its disk. Its own inverse."""
    return sequence_hash ^ _DISK_MEDIUM


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
    packed = pack_token_ids(token_ids[first:end])
    parent = blocks[-1].sequence_hash if blocks else root
    for start in range(0, len(packed), 4 * block_size):
        token_bytes = packed[start : start + 4 * block_size]
        local = local_hash(token_bytes)
        parent = local if parent is None else chain_hash(parent, local)
        blocks.append(FullBlock(parent, token_bytes))


class HashChain:
    """The sequence hashes of the full blocks of a prompt, first block first.

    A hash is computed when an iteration reaches its block for the first time: a reader that stops early does not pay
    for the rest of a long prompt. `packed` is the result of `pack_token_ids`.
    """

    def __init__(self, packed: bytes, block_size: int, root: int | None = None) -> None:
        self._block_bytes = 4 * block_size
        self._full_blocks = memoryview(packed)[: len(packed) // self._block_bytes * self._block_bytes]
        self._root = root
        self._known: list[int] = []  # of the leading blocks

    def __len__(self) -> int:
        return len(self._full_blocks) // self._block_bytes

    @property
    def num_computed(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[int]:
        known = self._known
        yield from known
        parent = known[-1] if known else self._root
        missing = self._full_blocks[len(known) * self._block_bytes :]
        # Written out instead of calls of local_hash and chain_hash: the calls would take as long as the hashes.
        for (token_bytes,) in struct.iter_unpack(f"{self._block_bytes}s", missing):
            local = _digest(token_bytes, HASH_SEED)
            parent = local if parent is None else _digest(_chain_input(parent, local), HASH_SEED)
            known.append(parent)
            yield parent


class PromptHashes:
    """The hash chains of one prompt, one for each block size that a reader asks for."""

    def __init__(self, packed: bytes, root: int | None = None, has_adapter: bool = False) -> None:
        self.has_adapter = has_adapter
        self.num_tokens = len(packed) // 4
        self._packed = packed
        self._root = root
        self._chains: dict[int, HashChain] = {}

    def chain(self, block_size: int) -> HashChain:
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = HashChain(self._packed, block_size, self._root)
        return chain


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array(U32, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_token_ids`. Raises `ValueError` if the length is no multiple of 4."""
    token_ids = array(U32)
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return tuple(token_ids)


def sequence_hashes(token_ids: Sequence[int], block_size: int, root: int | None = None) -> list[int]:
    """Sequence hashes of every full block of `token_ids`, first block first."""
    return list(HashChain(pack_token_ids(token_ids), block_size, root))
