"""Digests of offered blocks, computed on a thread beside the agent's.

    ComputeDigests --thread--> digest of each block
    READY          --queue, until its digests and every READY of its hand-off before it are done--> sent

A block does not change while it is leased, so its digest is computed once for each offer. Where the reader's layout
differs, a READY names pieces of blocks, and their digests are computed when the READY is sent.

A device hashes thousands of blocks in the time of one message, so its digests are computed at once, without the thread.

The thread computes a few blocks of each job in turn, so that few blocks do not wait for thousands of another hand-off.
Between two turns it yields, so that the agent's thread sends messages sooner where both share a core.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from core.handoff import Ready, TransferId
from core.kv_layout import KVLayout
from kv_transfer.protocol.digests import Digests, of_pieces
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.transports.transport import PoolMemory

BLOCKS_PER_TURN = 16


@dataclass(frozen=True, slots=True)
class _QueuedReady:
    """A READY without its digests."""

    is_done: Callable[[], bool]
    send: Callable[[], None]


class OfferedDigests:
    def __init__(self, name: str, pool: PoolMemory, enabled: bool, wake: Callable[[], None]) -> None:
        """The thread calls `wake` when digests are ready."""
        self._pool, self._layout = pool, pool.layout
        self._view = pool.view if enabled else None
        self._memory = pool.memory if enabled and pool.view is None else None
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"digests-{name}")
        self._jobs: deque[Future[None]] = deque()  # turns, oldest first; the thread appends, too
        self._closed = False
        self._num_jobs = 0
        self._job_of: dict[int, int] = {}  # block -> the newest job for its digest
        self._digests: dict[int, tuple[int, int]] = {}  # block -> (job, digest)
        self._queues: dict[TransferId, deque[_QueuedReady]] = {}  # oldest first; none is empty

    def compute(self, blocks: tuple[int, ...]) -> None:
        """Start to compute the digests of blocks that have just been leased."""
        if self._view is None and self._memory is None:
            return
        self._num_jobs += 1
        self._job_of.update(dict.fromkeys(blocks, self._num_jobs))
        if self._memory is not None:
            digests = self._memory.digests(blocks, self._layout.block_bytes)
            self._digests.update(
                (block, (self._num_jobs, digest)) for block, digest in zip(blocks, digests, strict=True)
            )
            return
        self._jobs.append(self._thread.submit(self._compute, blocks, self._num_jobs))

    def when_ready(self, ready: Ready, peer: KVLayout, send: Callable[[Digests], None]) -> None:
        """Call `send` with the digests of a READY once they are computed; with () where digests are off."""
        if self._view is None and (self._memory is None or peer != self._layout):
            send(())
        elif peer == self._layout:
            blocks = ready.blocks.blocks
            digests = self._digests
            jobs = [self._job_of[block] for block in blocks]  # a later one changes no digest, and is not waited for
            self._enqueue(
                ready,
                _QueuedReady(
                    lambda: self._has(blocks, jobs), lambda: send(tuple([digests[block][1] for block in blocks]))
                ),
            )
            self.send_ready()
        else:
            assert self._view is not None
            plan = TransferPlan(self._layout, peer)
            pieces = [plan.source_spans(piece, block) for piece, block, _ in ready.blocks]
            future = self._thread.submit(of_pieces, self._view, pieces)
            self._enqueue(ready, _QueuedReady(future.done, lambda: send(future.result())))
            future.add_done_callback(lambda _: self._wake())

    def send_ready(self) -> None:
        """Send the READYs whose digests are computed, those of each hand-off in order. Raises an exception of the
        thread."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        for transfer_id, queue in list(self._queues.items()):
            while queue and queue[0].is_done():
                queue.popleft().send()
            if not queue:
                del self._queues[transfer_id]

    @property
    def busy(self) -> bool:
        """Whether a READY is in the queue."""
        return bool(self._queues)

    def close(self) -> None:
        """End the thread, and drop the digests that are not computed yet."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _enqueue(self, ready: Ready, queued: _QueuedReady) -> None:
        self._queues.setdefault(ready.transfer_id, deque()).append(queued)

    def _has(self, blocks: tuple[int, ...], jobs: list[int]) -> bool:
        computed = self._digests  # the last block of a job is computed last
        wanted = zip(reversed(blocks), reversed(jobs), strict=True)
        return all(block in computed and computed[block][0] >= job for block, job in wanted)

    # ---- on the thread

    def _compute(self, blocks: tuple[int, ...], job: int) -> None:
        turn, rest = blocks[:BLOCKS_PER_TURN], blocks[BLOCKS_PER_TURN:]
        for block, digest in zip(turn, self._pool.digests(turn), strict=True):
            if block not in self._digests or self._digests[block][0] < job:
                self._digests[block] = (job, digest)
        if self._queues:
            self._wake()
        os.sched_yield()
        if rest and not self._closed:
            self._jobs.append(self._thread.submit(self._compute, rest, job))
