"""Digests of the blocks we offer, from the step that computed them until the block is used for something else.

    KeepDigests --thread--> kept      READY: those that were kept, never computed anew
                             |
    CheckBlocks --thread--> compared with the bytes as they are now --> BlocksChecked

So a byte that changes while a block lies in the prefix cache does not get a digest that fits it. READYs leave in the
order in which they were sent, each once its digests are kept and every check asked for before it has an answer; a READY
of a transfer whose cached blocks turned out to be spoilt does not leave at all.

The thread does nothing but hash, and gives way every few blocks: where it shares a core with the agent's thread, that
one has messages to see to. What it has kept is seen by the agent's thread at once; all else here is that thread's own.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from core.handoff import Ready, TransferId
from core.kv_layout import KVLayout
from kv_transfer.digests import Digests, of_blocks, of_pieces
from kv_transfer.events import BlocksChecked, CheckBlocks, KeepDigests
from kv_transfer.plan import TransferPlan
from kv_transfer.transports.transport import PoolMemory

BLOCKS_PER_TURN = 16
MAX_SPOILT = 1024  # transfers that are remembered


@dataclass(frozen=True, slots=True)
class _Asked:
    is_done: Callable[[], bool]
    finish: Callable[[], None]


class KeptDigests:
    def __init__(self, name: str, pool: PoolMemory, enabled: bool, wake: Callable[[], None]) -> None:
        """`wake` is called from the thread, when there is something to take. Device memory has no digests."""
        self._layout = pool.layout
        self._view = pool.view if enabled else None
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"digests-{name}")
        self._asked: deque[_Asked] = deque()  # oldest first
        self._keeping: deque[Future[None]] = deque()  # oldest first
        self._num_jobs = 0
        self._job_of: dict[int, int] = {}  # block -> the last job that was to keep its digest
        self._kept: dict[int, int] = {}  # block -> digest
        self._spoilt: OrderedDict[TransferId, None] = OrderedDict()

    def keep(self, action: KeepDigests) -> None:
        if self._view is None:
            return
        self._num_jobs += 1
        for block in action.blocks:
            self._job_of[block] = self._num_jobs
            self._kept.pop(block, None)
        self._keeping.append(self._thread.submit(self._keep, self._view, action.blocks, self._num_jobs))

    def check(self, action: CheckBlocks, then: Callable[[BlocksChecked], None]) -> None:
        """Without digests nothing is found."""
        if self._view is None:
            then(BlocksChecked(action.transfer_id, ()))
            return

        def finish(spoilt: tuple[tuple[int, int], ...]) -> None:
            if spoilt:
                self._spoilt[action.transfer_id] = None
                while len(self._spoilt) > MAX_SPOILT:
                    self._spoilt.popitem(last=False)
            then(BlocksChecked(action.transfer_id, spoilt))

        self._ask(partial(self._compare, self._view, action.blocks), finish)

    def of_offered(self, ready: Ready, peer: KVLayout, then: Callable[[Digests], None]) -> None:
        """`then` gets those of the READY, or nothing where digests are off."""
        if self._view is None:
            then(())
        elif peer == self._layout:
            blocks = ready.blocks.blocks
            asked = _Asked(
                lambda: self._kept.keys() >= set(blocks),
                lambda: self._unless_spoilt(ready, then, tuple([self._kept[block] for block in blocks])),
            )
            self._asked.append(asked)
            self.take()
        else:
            plan = TransferPlan(self._layout, peer)
            pieces = [plan.source_spans(piece, block) for piece, block, _ in ready.blocks]
            self._ask(partial(of_pieces, self._view, pieces), partial(self._unless_spoilt, ready, then))

    def take(self) -> None:
        """Hand over what is ready. Raises what the thread raised."""
        while self._keeping and self._keeping[0].done():
            self._keeping.popleft().result()
        while self._asked and self._asked[0].is_done():
            self._asked.popleft().finish()

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def close(self) -> None:
        """End the thread; what was asked for and is not done is dropped."""
        self._thread.shutdown(cancel_futures=True)

    # ---- inside

    def _ask(self, compute: Callable[[], tuple[object, ...]], then: Callable[..., None]) -> None:
        future = self._thread.submit(compute)
        self._asked.append(_Asked(future.done, lambda: then(future.result())))
        future.add_done_callback(lambda _: self._wake())

    def _unless_spoilt(self, ready: Ready, then: Callable[[Digests], None], digests: Digests) -> None:
        if ready.transfer_id not in self._spoilt:
            then(digests)

    # ---- on the thread

    def _keep(self, memory: memoryview, blocks: tuple[int, ...], job: int) -> None:
        for first in range(0, len(blocks), BLOCKS_PER_TURN):
            turn = blocks[first : first + BLOCKS_PER_TURN]
            for block, digest in zip(turn, of_blocks(memory, turn, self._layout.block_bytes), strict=True):
                if self._job_of[block] == job:  # else it holds something else by now
                    self._kept[block] = digest
            if self._asked:
                self._wake()
            os.sched_yield()

    def _compare(self, memory: memoryview, blocks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        spoilt = []
        for block, content in blocks:
            (digest,) = of_blocks(memory, [block], self._layout.block_bytes)
            if self._kept.get(block, digest) != digest:
                spoilt.append((block, content))
        return tuple(spoilt)
