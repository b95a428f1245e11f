"""Digests of what moves: XXH3_64 over the bytes of a block, or over the spans of a piece where two layouts differ.

Owner and puller go through the spans in the order of the plan (kv_transfer/plan.py), so equal bytes give equal digests
whatever the layouts. Those of what a read has brought are computed where it landed, while the bytes are in the cache
(kv_transfer/reads.py). Those of what we offer are computed by a thread of its own, since it is as much work as the
copy; the agent's thread takes the results, in the order in which it asked for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from core.handoff import Ready
from core.kv_layout import KVLayout
from kv_transfer.events import StartRead
from kv_transfer.plan import TransferPlan
from kv_transfer.transports.transport import PoolMemory

Digests = tuple[int, ...]
Piece = tuple[list[int], int]  # first bytes of its spans, and the length of each


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
        pairs = read.pairs[first:end]
        if not read.pieces:
            return _digests(self._view, [([target * self._block_bytes], self._block_bytes) for _, target in pairs])
        moved = zip(read.pieces[first:end], pairs, strict=True)
        pieces = [(plan.target_spans(piece, target), plan.span_bytes) for piece, (_, target) in moved]
        return _digests(self._view, pieces)


class OfferDigests:
    """Of our blocks that a READY announces."""

    def __init__(self, name: str, pool: PoolMemory, enabled: bool, wake: Callable[[], None]) -> None:
        """`wake` is called from the thread, when there is something to take. Device memory has no digests."""
        self._layout = pool.layout
        self._view = pool.view if enabled else None
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"digests-{name}")
        self._asked: deque[tuple[Future[Digests], Callable[[Digests], None]]] = deque()  # oldest first

    def of_offered(self, ready: Ready, peer: KVLayout, then: Callable[[Digests], None]) -> None:
        """`then` gets those of the READY, or nothing where digests are off."""
        if peer == self._layout:
            pieces = self._whole_blocks(offered.block for offered in ready.blocks)
        else:
            plan = TransferPlan(self._layout, peer)
            pieces = [(plan.source_spans(piece, block), plan.span_bytes) for piece, block, _ in ready.blocks]
        self._ask(pieces, then)

    def take(self) -> None:
        """Hand over what is ready. Raises what the computation raised."""
        while self._asked and self._asked[0][0].done():
            future, then = self._asked.popleft()
            then(future.result())

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def close(self) -> None:
        """End the thread; what was asked for and is not done is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _whole_blocks(self, blocks: Iterable[int]) -> list[Piece]:
        size = self._layout.block_bytes
        return [([block * size], size) for block in blocks]

    def _ask(self, pieces: list[Piece], then: Callable[[Digests], None]) -> None:
        if self._view is None:
            then(())
            return
        future = self._thread.submit(_digests, self._view, pieces)
        self._asked.append((future, then))
        future.add_done_callback(lambda _: self._wake())


def _digests(memory: memoryview, pieces: list[Piece]) -> Digests:
    return tuple(_digest(memory, starts, num_bytes) for starts, num_bytes in pieces)


def _digest(memory: memoryview, starts: list[int], num_bytes: int) -> int:
    if len(starts) == 1:
        return xxhash.xxh3_64_intdigest(memory[starts[0] : starts[0] + num_bytes])
    state = xxhash.xxh3_64()
    for start in starts:
        state.update(memory[start : start + num_bytes])
    return state.intdigest()
