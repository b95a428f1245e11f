"""The scheduler: one for prefill, decode and co-located workers.

Each step brings sequences' `num_computed_tokens` towards `num_tokens` inside a token budget:

    1. running sequences in rank order (priority, then arrival): a decode takes 1 token, a prefill a chunk of what the
       decodes behind it leave;
    2. where the pool is out of blocks, the lowest-ranked holder behind is preempted: it gives up its blocks and is
       recomputed later (mostly from the prefix cache). With nobody behind, a chunk makes do with the blocks there are,
       or waits for those before it;
    3. if nobody lacked blocks, waiting sequences are admitted in rank order. A caller with a queue of its own names the
       rank of its first sequence: no waiting sequence that ranks behind is given its first blocks.

The highest-ranked holder can always take the blocks of all others, and `add` refuses what could never fit, so somebody
always gets on; only blocks leased or reserved outside can make everyone wait. One step is in flight at a time; a
sequence aborted meanwhile keeps its blocks until the step has ended, since the runner may still write to them.
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
    """Decides each step. Owns the sequences it was given and their blocks."""

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

    # ---- sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. If it comes with computed tokens it must hold their blocks already.

        Raises `QueueFull`, or `InvalidRequest` where the sequence alone would not fit into the pool; its blocks are
        then still the caller's to release.
        """
        assert sequence.sequence_id not in self._by_id, f"{sequence.sequence_id} was added twice"
        assert sequence.num_tokens < sequence.request.max_total_tokens, f"{sequence.sequence_id} has all its tokens"
        assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.sequence_id} has nothing to compute"
        assert sequence.num_computed_tokens <= len(sequence.block_table) * self.block_size
        self.refuse_oversized(sequence)
        # A sequence that comes with its blocks waited elsewhere, in a queue with its own bound.
        if not sequence.block_table and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} sequences wait already (max_waiting)")
        self._by_id[sequence.sequence_id] = sequence
        insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def refuse_oversized(self, sequence: Sequence) -> None:
        """Raise `InvalidRequest` where the whole pool would not hold this sequence to its end."""
        num_tokens = sequence.request.max_total_tokens
        if sequence.sample_limit is not None:
            num_tokens = min(num_tokens, sequence.num_tokens + sequence.sample_limit)
        # The last token is only ever sampled, never computed, so it needs no slot.
        if -(-(num_tokens - 1) // self.block_size) > self.pool.num_blocks:
            raise InvalidRequest(
                "max_tokens", f"{num_tokens} tokens need more than the pool's {self.pool.num_blocks} KV blocks"
            )

    def abort(self, sequence_id: str) -> bool:
        """End a sequence now. False where it is not here (any more)."""
        sequence = self._by_id.get(sequence_id)
        if sequence is None or sequence.finish_reason is not None:
            return False
        self._finish(sequence, FinishReason.ERROR)
        return True

    def get(self, sequence_id: str) -> Sequence | None:
        return self._by_id.get(sequence_id)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that still have to be computed before every sequence here is in decode."""
        return sum(sequence.num_uncomputed_tokens for sequence in self._by_id.values() if not _decodes(sequence))

    # ---- steps

    def schedule(self, admit_before: Rank | None = None) -> StepPlan | None:
        """The next step, or None where there is nothing to compute (or no block to compute it in).

        `admit_before` is the rank of a sequence elsewhere that waits for blocks of this pool. A waiting sequence that
        ranks behind is admitted only if it came with its blocks: it frees them only by running.
        """
        assert self.step_in_flight is None, "one step at a time"
        chunks: list[ScheduledChunk] = []
        budget = self.config.max_batched_tokens
        decodes_behind = sum(_decodes(sequence) for sequence in self.running)
        blocks_sufficed = True
        for sequence in list(self.running):
            if not sequence.block_table:
                continue  # preempted for a sequence before it
            decodes_behind -= _decodes(sequence)
            wanted = min(sequence.num_uncomputed_tokens, budget - decodes_behind)
            if wanted <= 0:
                continue
            granted = self._grow_or_preempt(sequence, wanted)
            blocks_sufficed = blocks_sufficed and granted == wanted
            if granted:
                chunks.append(_chunk(sequence, granted))
                budget -= granted
            elif not chunks and any(holder.rank < sequence.rank for holder in self._holders()):
                # A pulled one that ranks higher waits with blocks, and nobody gets on: yield, or both wait for ever.
                self._preempt(sequence)
        if blocks_sufficed or not chunks:
            chunks += self._admit(budget, admit_before)
        if not chunks:
            return None
        self.step_in_flight = StepPlan(self._next_step_id, tuple(chunks))
        self._next_step_id += 1
        return self.step_in_flight

    def complete_step(self, output: StepOutput) -> list[TokenEvent]:
        """Take the results of the step in flight; finished sequences leave and give up their blocks."""
        plan = self.step_in_flight
        assert plan is not None, "no step is in flight"
        assert plan.step_id == output.step_id, "another step is in flight"
        self.step_in_flight = None
        events = []
        for chunk in plan.chunks:
            sequence = self._by_id[chunk.sequence_id]
            if sequence.finish_reason is not None:
                self._leave(sequence)  # aborted while the step ran
                continue
            sequence.num_computed_tokens += chunk.num_tokens
            self._register_full_blocks(sequence)
            if chunk.samples:
                events.append(self._append_token(sequence, output))
        return events

    def fail_step(self) -> list[Sequence]:
        """The step in flight produced nothing: every sequence in it ends. Returns those not ended before."""
        plan, self.step_in_flight = self.step_in_flight, None
        assert plan is not None, "no step is in flight"
        failed = []
        for chunk in plan.chunks:
            sequence = self._by_id[chunk.sequence_id]
            if sequence.finish_reason is None:
                failed.append(sequence)
            self._finish(sequence, FinishReason.ERROR)
        return failed

    # ---- blocks

    def hold_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Share the longest cached prefix of at most `max_tokens` tokens; the sequence must hold no block yet."""
        assert not sequence.block_table
        blocks = sequence.full_blocks(self.block_size)[: max_tokens // self.block_size]
        found = self.pool.match_prefix(blocks, sequence.request.cache_salt)
        sequence.block_table = [cached.block for cached in found]
        self.pool.share(sequence.block_table)
        if found:
            sequence.cache_parent = found[-1]
        sequence.num_registered_blocks = len(sequence.block_table)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for its first `num_tokens` tokens. False, and nothing changed, without enough."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table += blocks
        return True

    def _holders(self) -> list[Sequence]:
        """Sequences with blocks: the running ones, and those waiting whose prompt was pulled."""
        return [sequence for sequence in self._by_id.values() if sequence.block_table]

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> int:
        """Make room for the next `num_tokens` tokens, taking blocks from the lowest-ranked; how many got room."""
        while not self._grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max(self._holders(), key=lambda holder: holder.rank)
            if victim.rank > sequence.rank:
                self._preempt(victim)
            else:
                num_blocks = len(sequence.block_table) + self.pool.num_available
                num_tokens = num_blocks * self.block_size - sequence.num_computed_tokens
        return num_tokens

    def _grow_first_waiting(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the first in the queue to `num_tokens`, taking blocks from those behind it where that is enough."""
        behind = [other for other in reversed(self.waiting) if other.block_table and other is not sequence]
        gain = self.pool.num_available_without(block for other in behind for block in other.block_table)
        if (len(sequence.block_table) + gain) * self.block_size < num_tokens:
            return False
        while not self._grow(sequence, num_tokens):
            self._preempt(behind.pop(0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a running sequence, or of a waiting one whose prompt was pulled."""
        self.drop_blocks(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence in self.running:
            self.running.remove(sequence)
            insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def _admit(self, budget: int, admit_before: Rank | None) -> list[ScheduledChunk]:
        """Move waiting sequences to running, in rank order, until one does not fit."""
        chunks: list[ScheduledChunk] = []
        while budget > 0 and len(self.running) < self.config.max_running:
            sequence = self._first_admissible(admit_before)
            if sequence is None:
                break
            came_with_blocks = bool(sequence.block_table)
            if not came_with_blocks:
                # One token must remain to be computed: its logits are what we sample from.
                self.hold_cached_prefix(sequence, sequence.num_tokens - 1)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._grow_first_waiting(sequence, sequence.num_computed_tokens + num_tokens):
                if not came_with_blocks:
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
        sequence.block_table = []
        sequence.num_registered_blocks = sequence.num_computed_tokens = 0
        sequence.cache_parent = sequence.request.cache_salt

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
        in_flight = self.step_in_flight is not None and any(
            chunk.sequence_id == sequence.sequence_id for chunk in self.step_in_flight.chunks
        )
        if not in_flight:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self._by_id[sequence.sequence_id]
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.drop_blocks(sequence)

    def check(self) -> None:
        """Every sequence in one queue, in order; every block table backed by holds."""
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
    """In decode, one token is left to compute: the one sampled last."""
    return sequence.num_uncomputed_tokens == 1


def _chunk(sequence: Sequence, num_tokens: int) -> ScheduledChunk:
    return ScheduledChunk(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        start=sequence.num_computed_tokens,
        num_tokens=num_tokens,
        block_table=sequence.block_table,
        samples=sequence.num_computed_tokens + num_tokens == sequence.num_tokens,
        sampling=sequence.request.sampling,
    )
