"""Blocks by rank: a sequence that lacks blocks takes them from the holders of blocks that rank lowest.

A preempted sequence loses all its blocks, waits again, and is recomputed later, mostly from the prefix cache. A
sequence that moves to another worker is never preempted: its peer leases the blocks, and the move ends within a lease.
The sequence that ranks highest can take the blocks of every other holder, so it always makes progress.
"""

from __future__ import annotations

from core.scheduling.block_pool import BlockPool
from core.scheduling.sequence import Sequence, by_rank
from core.scheduling.sequence_blocks import SequenceBlocks
from core.scheduling.sequence_queues import SequenceQueues


class Preemption:
    """Preempts sequences of `queues`. Holders of blocks are running, or wait with a pulled prompt. No step may be in
    flight: the runner may still write to the blocks of its sequences."""

    def __init__(self, pool: BlockPool, blocks: SequenceBlocks, queues: SequenceQueues, block_size: int) -> None:
        self.pool, self.blocks, self.queues, self.block_size = pool, blocks, queues, block_size
        self.running = queues.running
        self.num_preemptions = 0

    def grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate for `num_tokens` more tokens, preempting lower ranks. Returns the number of tokens with blocks."""
        while not self.blocks.grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = self.last_holder
            if victim is not None and victim.rank > sequence.rank:
                self.preempt(victim)
            else:
                num_blocks = len(sequence.block_table) + self.pool.num_available
                num_tokens = num_blocks * self.block_size - sequence.num_computed_tokens
        return num_tokens

    def first_holder(self) -> Sequence:
        """The holder of blocks that ranks highest. All running sequences hold blocks."""
        return min((*self.running[:1], *self.queues.waiting_with_blocks[:1]), key=by_rank)

    def others_have_blocks_for(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the blocks of the other waiting sequences would be enough for the first `num_tokens` tokens."""
        others = [other for other in self.queues.waiting_with_blocks if other is not sequence]
        gain = self.pool.num_available_without(block for other in others for block in other.block_table)
        return (len(sequence.block_table) + gain) * self.block_size >= num_tokens

    def grow_by_preempting_others(self, sequence: Sequence, num_tokens: int) -> None:
        others = [other for other in self.queues.waiting_with_blocks if other is not sequence]
        while not self.blocks.grow(sequence, num_tokens):
            self.preempt(others.pop())

    @property
    def last_holder(self) -> Sequence | None:
        """The holder of blocks that ranks lowest, of those that do not move to another worker."""
        running = next((sequence for sequence in reversed(self.running) if not sequence.is_moving), None)
        holders = [*self.queues.waiting_with_blocks[-1:], *([] if running is None else [running])]
        return max(holders, key=by_rank, default=None)

    def preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence, or of a waiting sequence with a pulled prompt."""
        assert not sequence.is_moving, "the blocks of a moving sequence are leased"
        num_computed, num_lost = sequence.num_computed_tokens, sequence.num_lost_tokens
        sequence.num_recomputed_tokens -= max(0, num_lost - num_computed)  # not yet computed again
        sequence.num_lost_tokens = max(num_lost, num_computed)
        self.blocks.drop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.send_back(sequence)
