"""Digests: XXH3_64 over the bytes of a block, or over the spans of a piece where two layouts differ.

Owner and puller hash the spans in the order of the plan (kv_transfer/protocol/plan.py), so equal bytes give equal
digests whatever the layouts. The puller hashes what it has read while the bytes are in the CPU's cache
(kv_transfer/reads.py). The owner hashes the blocks it offers on a thread beside the agent
(kv_transfer/offered_digests.py).

A device hashes whole blocks of its own pool (`DeviceMemory.digests`), and no pieces. So between unequal layouts, a pool
on a device has no digests, neither as the owner's nor as the puller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from kv_transfer.protocol.plan import Span

Digests = tuple[int, ...]


def of_blocks(memory: memoryview, blocks: Iterable[int], block_bytes: int) -> Digests:
    """Digests of whole blocks of a pool."""
    return tuple(xxhash.xxh3_64_intdigest(memory[block * block_bytes : (block + 1) * block_bytes]) for block in blocks)


def of_pieces(memory: memoryview, pieces: Iterable[Sequence[Span]]) -> Digests:
    """Digests of pieces, each given by its spans. Another cut into spans gives the same digest."""
    return tuple(_digest(memory, spans) for spans in pieces)


def _digest(memory: memoryview, spans: Sequence[Span]) -> int:
    state = xxhash.xxh3_64()
    for first, num_bytes in spans:
        state.update(memory[first : first + num_bytes])
    return state.intdigest()
