"""The prefix cache of a pool in the hands of a test that knows blocks by made-up hashes."""

from __future__ import annotations

from collections.abc import Iterable

from core.block_hash import FullBlock
from core.block_pool import BlockPool, PrefixBlock


def full_blocks(hashes: Iterable[int]) -> list[FullBlock]:
    """Blocks whose tokens differ where their hashes do."""
    return [FullBlock(sequence_hash, sequence_hash.to_bytes(8, "little")) for sequence_hash in hashes]


def register_prefix(pool: BlockPool, blocks: Iterable[int], hashes: Iterable[int]) -> None:
    parent: PrefixBlock | str | None = ""
    for block, full in zip(blocks, full_blocks(hashes), strict=True):
        parent = pool.register(block, full, parent)


def match(pool: BlockPool, hashes: Iterable[int]) -> list[int]:
    """Block ids of the longest cached prefix."""
    return [found.block for found in pool.match_prefix(full_blocks(hashes), "")]
