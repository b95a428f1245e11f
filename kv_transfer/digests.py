"""Digests of what moves: XXH3_64 over the bytes of a block, or over the spans of a piece where two layouts differ.

Owner and puller go through the spans in the order of the plan (kv_transfer/plan.py), so equal bytes give equal digests
whatever the layouts. Those of what a read has brought are computed where it landed, while the bytes are in the cache
(kv_transfer/reads.py). Digests of the blocks we offer are computed beside the agent (kv_transfer/offered_digests.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from kv_transfer.events import StartRead
from kv_transfer.plan import Span, TransferPlan
from kv_transfer.transports.transport import PoolMemory

Digests = tuple[int, ...]


class ReadDigests:
    """Of what reads have brought into our pool."""

    def __init__(self, pool: PoolMemory, enabled: bool) -> None:
        self._view = pool.view if enabled else None
        self._block_bytes = pool.layout.block_bytes

    @property
    def enabled(self) -> bool:
        """Device memory has no digests."""
        return self._view is not None

    def of_read(self, read: StartRead, plan: TransferPlan, first: int, end: int) -> Digests:
        """Of the targets of pairs [first, end)."""
        assert self._view is not None
        targets = read.targets[first:end]
        if not read.pieces:
            return of_blocks(self._view, targets, self._block_bytes)
        moved = zip(read.pieces[first:end], targets, strict=True)
        return of_pieces(self._view, (plan.target_spans(piece, target) for piece, target in moved))


def of_blocks(memory: memoryview, blocks: Iterable[int], block_bytes: int) -> Digests:
    """Of whole blocks of a pool."""
    return tuple(xxhash.xxh3_64_intdigest(memory[block * block_bytes : (block + 1) * block_bytes]) for block in blocks)


def of_pieces(memory: memoryview, pieces: Iterable[Sequence[Span]]) -> Digests:
    """Of the spans of each, as if they lay one behind the other: how they are torn apart does not matter."""
    return tuple(_digest(memory, spans) for spans in pieces)


def _digest(memory: memoryview, spans: Sequence[Span]) -> int:
    state = xxhash.xxh3_64()
    for first, num_bytes in spans:
        state.update(memory[first : first + num_bytes])
    return state.intdigest()
