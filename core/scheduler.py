"""The scheduler of prefill and decode workers.

Each step computes tokens of sequences, up to a token budget:

    1. It takes running sequences in rank order (priority, then arrival). A sequence in decode gets 1 token. A sequence
       in prefill gets a chunk of the budget that the decodes behind it leave.
    2. If the pool is out of blocks, the scheduler preempts the lowest-ranked holder of blocks: this sequence loses its
       blocks and is recomputed later, mostly from the prefix cache. If no holder ranks lower, the chunk shrinks to the
       available blocks, or waits.
    3. If no running sequence lacked blocks, the scheduler admits waiting sequences in rank order. A caller with a queue
       of its own passes the rank of its first sequence; no waiting sequence of lower rank gets its first blocks then.

The highest-ranked holder can take the blocks of every other holder, and `add` refuses a sequence that is larger than
the pool. So a step always makes progress, unless leases or reservations keep the blocks. One step is in flight at a
time. A sequence that is aborted during a step keeps its blocks until the step ends: the runner may still write to them.
"""

from __future__ import annotations

from bisect import insort

from core.block_pool import BlockPool
from core.config import SchedulerConfig
from core.errors import InvalidRequest, QueueFull
from core.lifecycle import FinishReason
from core.sequence import Rank, Sequence
from core.step import ScheduledChunk, StepOutput, StepPlan, TokenEvent


class Scheduler:
    """Decides each step. Owns the added sequences and their blocks."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, block_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.config = config
        self.pool = pool
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.waiting: list[Sequence] = []  # in rank order
        self.running: list[Sequence] = []  # in rank order
        self.step_in_flight: StepPlan | None = None
        self._by_id: dict[str, Sequence] = {}
        self._next_step_id = 0
        self.num_preemptions = 0

    # ---- sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. A sequence with computed tokens must hold their blocks.

        Raises `QueueFull`, or `InvalidRequest` for a sequence that is larger than the pool. The caller then releases
        the blocks of the sequence.
        """
        assert sequence.sequence_id not in self._by_id, f"{sequence.sequence_id} was added twice"
        assert sequence.num_tokens < sequence.request.max_total_tokens, f"{sequence.sequence_id} has all its tokens"
        assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.sequence_id} has nothing to compute"
        assert sequence.num_computed_tokens <= len(sequence.block_table) * self.block_size
        self.refuse_oversized(sequence)
        # A sequence with blocks has waited in another queue, which has a bound of its own.
        if not sequence.block_table and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} sequences wait already (max_waiting)")
        self._by_id[sequence.sequence_id] = sequence
        insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def refuse_oversized(self, sequence: Sequence) -> None:
        """Raise `InvalidRequest` if the whole pool is too small for all tokens of this sequence."""
        num_tokens = sequence.request.max_total_tokens
        if sequence.sample_limit is not None:
            num_tokens = min(num_tokens, sequence.num_tokens + sequence.sample_limit)
        # The last token is sampled but not computed, so it needs no slot.
        if -(-(num_tokens - 1) // self.block_size) > self.pool.num_blocks:
            raise InvalidRequest(
                "max_tokens", f"{num_tokens} tokens need more than the pool's {self.pool.num_blocks} KV blocks"
            )

    def abort(self, sequence_id: str) -> bool:
        """End a sequence now. Returns False if the scheduler does not have it, or it has ended."""
        sequence = self._by_id.get(sequence_id)
        if sequence is None or sequence.finish_reason is not None:
            return False
        self._finish(sequence, FinishReason.ERROR)
        return True

    def get(self, sequence_id: str) -> Sequence | None:
        return self._by_id.get(sequence_id)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before every sequence of the scheduler is in decode."""
        return sum(sequence.num_uncomputed_tokens for sequence in self._by_id.values() if not _decodes(sequence))

    # ---- steps

    def schedule(self, admit_before: Rank | None = None) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or no block to compute it in.

        `admit_before` is the rank of a sequence in another queue that waits for blocks of this pool. A waiting sequence
        of lower rank is admitted only if it holds blocks: it has to run in order to free them.
        """
        assert self.step_in_flight is None, "one step at a time"
        chunks: list[ScheduledChunk] = []
        budget = self.config.max_batched_tokens
        decodes_behind = sum(_decodes(sequence) for sequence in self.running)
        had_enough_blocks = True
        for sequence in list(self.running):
            if not sequence.block_table:
                continue  # preempted in this step by a sequence of higher rank
            decodes_behind -= _decodes(sequence)
            wanted = min(sequence.num_uncomputed_tokens, budget - decodes_behind)
            if wanted <= 0:
                continue
            granted = self._grow_or_preempt(sequence, wanted)
            had_enough_blocks = had_enough_blocks and granted == wanted
            if granted:
                chunks.append(_chunk(sequence, granted))
                budget -= granted
            elif not chunks and any(holder.rank < sequence.rank for holder in self._holders()):
                # A pulled sequence of higher rank waits and holds blocks. Without this, both would wait for ever.
                self._preempt(sequence)
        if had_enough_blocks or not chunks:
            chunks += self._admit(budget, admit_before)
        if not chunks:
            return None
        self.step_in_flight = StepPlan(self._next_step_id, tuple(chunks))
        self._next_step_id += 1
        return self.step_in_flight

    def complete_step(self, output: StepOutput) -> list[TokenEvent]:
        """Take the results of the step in flight. Finished sequences leave the scheduler and release their blocks."""
        plan = self.step_in_flight
        assert plan is not None, "no step is in flight"
        assert plan.step_id == output.step_id, "another step is in flight"
        self.step_in_flight = None
        events = []
        for chunk in plan.chunks:
            sequence = self._by_id[chunk.sequence.sequence_id]
            if sequence.finish_reason is not None:
                self._leave(sequence)  # aborted while the step ran
                continue
            sequence.num_computed_tokens += chunk.num_tokens
            self._register_full_blocks(sequence)
            if chunk.samples:
                events.append(self._append_token(sequence, output))
        return events

    def fail_step(self) -> list[Sequence]:
        """End every sequence of the step in flight, which failed. Returns the sequences that had not ended before."""
        plan, self.step_in_flight = self.step_in_flight, None
        assert plan is not None, "no step is in flight"
        failed = []
        for chunk in plan.chunks:
            sequence = self._by_id[chunk.sequence.sequence_id]
            if sequence.finish_reason is None:
                failed.append(sequence)
            self._finish(sequence, FinishReason.ERROR)
        return failed

    # ---- blocks

    def hold_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Share the longest cached prefix of at most `max_tokens` tokens. The sequence must hold no block."""
        assert not sequence.block_table
        blocks = sequence.full_blocks(self.block_size)[: max_tokens // self.block_size]
        found = self.pool.match_prefix(blocks, sequence.request.cache_salt)
        sequence.block_table += [cached.block for cached in found]
        self.pool.share(sequence.block_table)
        if found:
            sequence.cache_parent = found[-1]
        sequence.num_registered_blocks = len(sequence.block_table)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for its first `num_tokens` tokens. Returns False, and changes nothing, if too few."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table += blocks
        return True

    def _holders(self) -> list[Sequence]:
        """Sequences with blocks: running sequences, and waiting sequences with a pulled prompt."""
        return [sequence for sequence in self._by_id.values() if sequence.block_table]

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate for `num_tokens` more tokens, preempting lower ranks. Returns the number of tokens with blocks."""
        while not self._grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max(self._holders(), key=lambda holder: holder.rank)
            if victim.rank > sequence.rank:
                self._preempt(victim)
            else:
                num_blocks = len(sequence.block_table) + self.pool.num_available
                num_tokens = num_blocks * self.block_size - sequence.num_computed_tokens
        return num_tokens

    def _grow_first_waiting(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for the first `num_tokens` tokens of the first waiting sequence, preempting the others if it helps.

        Returns False, and changes nothing, if all their blocks are too few.
        """
        behind = [other for other in reversed(self.waiting) if other.block_table and other is not sequence]
        gain = self.pool.num_available_without(block for other in behind for block in other.block_table)
        if (len(sequence.block_table) + gain) * self.block_size < num_tokens:
            return False
        while not self._grow(sequence, num_tokens):
            self._preempt(behind.pop(0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence, or of a waiting sequence with a pulled prompt."""
        self.drop_blocks(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence in self.running:
            self.running.remove(sequence)
            insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def _admit(self, budget: int, admit_before: Rank | None) -> list[ScheduledChunk]:
        """Move waiting sequences to `running`, in rank order, up to the first that does not fit."""
        chunks: list[ScheduledChunk] = []
        while budget > 0 and len(self.running) < self.config.max_running:
            sequence = self._first_admissible(admit_before)
            if sequence is None:
                break
            had_blocks = bool(sequence.block_table)
            if not had_blocks:
                # The last token is computed even if it is cached: the next token is sampled from its logits.
                self.hold_cached_prefix(sequence, sequence.num_tokens - 1)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._grow_first_waiting(sequence, sequence.num_computed_tokens + num_tokens):
                if not had_blocks:
                    self.drop_blocks(sequence)
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda admitted: admitted.rank)
            chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def _first_admissible(self, admit_before: Rank | None) -> Sequence | None:
        for sequence in self.waiting:
            if admit_before is None or sequence.rank < admit_before or sequence.block_table:
                return sequence
        return None

    def _register_full_blocks(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full == sequence.num_registered_blocks:
            return
        blocks = sequence.full_blocks(self.block_size)
        for position in range(sequence.num_registered_blocks, num_full):
            sequence.cache_parent = self.pool.register(
                sequence.block_table[position], blocks[position], sequence.cache_parent
            )
        sequence.num_registered_blocks = num_full

    def _append_token(self, sequence: Sequence, output: StepOutput) -> TokenEvent:
        token = output.sampled[sequence.sequence_id]
        sequence.token_ids.append(token.token_id)
        sequence.num_sampled_tokens += 1
        reason = sequence.finish_reason_after(token.token_id, self.eos_token_ids)
        index = sequence.num_tokens - sequence.request.num_prompt_tokens - 1
        if reason is not None:
            self._finish(sequence, reason)
        return TokenEvent(sequence.sequence_id, index, token, reason)

    def drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_registered_blocks = sequence.num_computed_tokens = 0
        sequence.cache_parent = sequence.request.cache_salt

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
        in_flight = self.step_in_flight is not None and any(
            chunk.sequence.sequence_id == sequence.sequence_id for chunk in self.step_in_flight.chunks
        )
        if not in_flight:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self._by_id[sequence.sequence_id]
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.drop_blocks(sequence)

    def check(self) -> None:
        """Every sequence is in one queue, in rank order, and its blocks cover its computed tokens."""
        assert self.running == sorted(self.running, key=lambda sequence: sequence.rank)
        assert self.waiting == sorted(self.waiting, key=lambda sequence: sequence.rank)
        assert len(self.running) <= self.config.max_running
        queued = {sequence.sequence_id for sequence in [*self.running, *self.waiting]}
        assert len(queued) == len(self.running) + len(self.waiting)
        assert queued == self._by_id.keys()
        for sequence in self._by_id.values():
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.finish_reason is None or self.step_in_flight is not None
        assert all(sequence.block_table for sequence in self.running)


def _decodes(sequence: Sequence) -> bool:
    """A sequence in decode has one token to compute: the newest sampled token."""
    return sequence.num_uncomputed_tokens == 1


def _chunk(sequence: Sequence, num_tokens: int) -> ScheduledChunk:
    start = sequence.num_computed_tokens
    return ScheduledChunk(sequence.view, start, num_tokens, start + num_tokens == sequence.num_tokens, promised=False)
