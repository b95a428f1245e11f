"""Digests of what moves: XXH3_64 over the bytes of a block, or over the spans of a piece where two layouts differ.

Owner and puller go through the spans in the order of the plan (kv_transfer/plan.py), so equal bytes give equal digests
whatever the layouts. A thread of its own computes them, so that the next read need not wait for those of the last; the
agent's thread takes the results, in the order in which it asked for them.
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


class Digester:
    def __init__(self, name: str, pool: PoolMemory, enabled: bool, wake: Callable[[], None]) -> None:
        """`wake` is called from the thread, when there is something to take. Device memory has no digests."""
        self._layout = pool.layout
        self._view = pool.view if enabled else None
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"digests-{name}")
        self._asked: deque[tuple[Future[Digests], Callable[[Digests], None]]] = deque()  # oldest first

    def of_offered(self, ready: Ready, peer: KVLayout, then: Callable[[Digests], None]) -> None:
        """Of our blocks that a READY announces. `then` gets them, or nothing where digests are off."""
        if peer == self._layout:
            pieces = self._whole_blocks(offered.block for offered in ready.blocks)
        else:
            plan = TransferPlan(self._layout, peer)
            pieces = [(plan.source_spans(piece, block), plan.span_bytes) for piece, block, _ in ready.blocks]
        self._ask(pieces, then)

    def of_read(self, read: StartRead, peer: KVLayout, then: Callable[[Digests], None]) -> None:
        """Of what a read has brought."""
        if not read.pieces:
            pieces = self._whole_blocks(target for _, target in read.pairs)
        else:
            plan = TransferPlan(peer, self._layout)
            moved = zip(read.pieces, read.pairs, strict=True)
            pieces = [(plan.target_spans(piece, target), plan.span_bytes) for piece, (_, target) in moved]
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
