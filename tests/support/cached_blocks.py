"""Takes blocks of a pool, puts them into its prefix cache, and finds them again by hashes that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable

from core.block_hash import FullBlock
from core.scheduling.block_pool import BlockPool, PrefixBlock


def allocated(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def reserved(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.reserve(count)
    assert blocks is not None
    return blocks


def full_blocks(hashes: Iterable[int]) -> list[FullBlock]:
    """One block for each hash. Different hashes have different tokens."""
    return [FullBlock(sequence_hash, sequence_hash.to_bytes(8, "little")) for sequence_hash in hashes]


def register_prefix(pool: BlockPool, blocks: Iterable[int], hashes: Iterable[int]) -> None:
    parent: PrefixBlock | str | None = ""
    for block, full in zip(blocks, full_blocks(hashes), strict=True):
        parent = pool.register(block, full, parent)


def match(pool: BlockPool, hashes: Iterable[int]) -> list[int]:
    """Block ids of the longest cached prefix."""
    return [found.block for found in pool.match_prefix(full_blocks(hashes), "")]
