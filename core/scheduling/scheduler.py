"""The scheduler of prefill and decode workers.

Each step computes tokens of sequences, up to a token budget. A step with sequences that wait for their next token has
a time limit, too (core/scheduling/step_budget.py):

    1. Each running sequence in decode gets 1 token. Waiting sequences that have pulled their prompts come next, unless
       waiting prompts of higher rank (priority, then arrival) have a claim to the free places. Prompts get the budget
       that the decodes leave, in the order of core/scheduling/prompt_order.py, whether they run or wait: a short prompt
       passes a long one that is half computed.
    2. If a running sequence that has its turn lacks blocks, the step is planned by rank: each running sequence gets its
       blocks, and the scheduler preempts the lowest-ranked holder of blocks. This sequence loses its blocks and is
       recomputed later, mostly from the prefix cache. If no holder ranks lower, the chunk shrinks to the available
       blocks, or waits.
    3. A prompt passes a half-computed prompt only if the pool has blocks for the rest of both. If the first waiting
       prompt in the order lacks blocks, no other is admitted in its place, but once no prompt is half computed, waiting
       sequences are admitted by rank, up to the first that does not fit. A caller with a queue of its own passes the
       rank of its first sequence; no waiting sequence of lower rank gets its first blocks then.

The highest-ranked holder can take the blocks of every other holder, and `add` refuses a sequence that is larger than
the pool. So a step always makes progress, unless leases or reservations keep the blocks.

One step may be planned ahead, while another is in flight. It counts on the tokens of the step in flight:

    4. A sequence whose promised token is certain to be its last is left out. A stop token is not certain: if the step
       in flight ends a sequence, the result of the step ahead is dropped, as after an abort.
    5. Nobody is preempted ahead. If a step needs a preemption, it is planned after the step in flight.

A sequence that ends while a step contains it keeps its blocks until the step ends: the runner may still write to them.
A sequence that could not be computed ends like that, and its blocks enter no prefix cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from core.config import SchedulerConfig
from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.errors import InvalidRequest, QueueFull
from core.lifecycle import FinishReason
from core.scheduling.block_pool import BlockPool
from core.scheduling.prompt_queue import PromptQueue
from core.scheduling.sequence import Rank, Sequence, by_rank
from core.scheduling.sequence_blocks import SequenceBlocks
from core.scheduling.sequence_queues import SequenceQueues
from core.scheduling.step_budget import LIMIT_SHARE, StepBudget
from core.step import ScheduledChunk, StepOutput, StepPlan, TokenEvent

MAX_STEPS_IN_FLIGHT = 2

# The constructor of a NamedTuple takes twice as long, and a step makes a chunk and an event for each sequence.
_new_tuple = tuple.__new__


class _StepInFlight(NamedTuple):
    plan: StepPlan
    sequences: list[Sequence]  # of the chunks, in order


@dataclass(slots=True)
class _Draft:
    """A step that is being planned."""

    budget: StepBudget
    chunks: list[ScheduledChunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a chunk of a sequence without a promised token."""
        start = sequence.num_planned_tokens
        end = sequence.num_planned_tokens = start + num_tokens
        self.chunks.append(ScheduledChunk(sequence.view, start, num_tokens, end == sequence.num_tokens, False))
        self.sequences.append(sequence)


def _is_decode(sequence: Sequence) -> bool:
    """Has one token to compute that is not promised."""
    return len(sequence.token_ids) - sequence.num_planned_tokens == 1


class Scheduler:
    """Decides each step. Owns the added sequences and their blocks."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, block_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.config = config
        self.pool = pool
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.blocks = SequenceBlocks(pool, block_size)
        self.queues = SequenceQueues(PromptQueue(self.blocks))
        self.waiting, self.running = self.queues.waiting, self.queues.running
        self._admitted: list[Sequence] = []  # by the newest step
        self._in_flight: list[_StepInFlight] = []  # oldest first
        self._next_step_id = 0
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0  # in chunks of more than one token
        self.num_released_blocks = 0  # that became available when a sequence ended
        self.step_cost: StepCost = PRIOR  # the owner sets it as it learns
        self.step_limit_s = LIMIT_SHARE * config.slo_itl_ms / 1e3  # of a step while sequences wait for a next token

    # ---- sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. A sequence with computed tokens must hold their blocks.

        Raises `QueueFull`, or `InvalidRequest` for a sequence that is larger than the pool. The caller then releases
        the blocks of the sequence.
        """
        assert sequence.sequence_id not in self.queues.by_id, f"{sequence.sequence_id} was added twice"
        assert sequence.num_tokens < sequence.max_num_tokens, f"{sequence.sequence_id} has all its tokens"
        assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.sequence_id} has nothing to compute"
        assert sequence.num_computed_tokens <= len(sequence.block_table) * self.block_size
        self.refuse_oversized(sequence)
        # A sequence with blocks has waited in another queue, which has a bound of its own.
        if not sequence.block_table and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} sequences wait already (max_waiting)")
        sequence.num_planned_tokens = sequence.num_computed_tokens
        sequence.stop_token_ids = sequence.request.sampling.stop_tokens(self.eos_token_ids)
        self.queues.add(sequence)

    def refuse_oversized(self, sequence: Sequence) -> None:
        """Raise `InvalidRequest` if the whole pool is too small for all tokens of this sequence."""
        # The last token is sampled but not computed, so it needs no slot.
        if -(-(sequence.max_num_tokens - 1) // self.block_size) > self.pool.num_blocks:
            raise InvalidRequest(
                "max_tokens",
                f"{sequence.max_num_tokens} tokens need more than the pool's {self.pool.num_blocks} KV blocks",
            )

    def abort(self, sequence_id: str) -> bool:
        """End a sequence now. Returns False if the scheduler does not have it, or it has ended."""
        sequence = self.queues.by_id.get(sequence_id)
        if sequence is None or sequence.finish_reason is not None:
            return False
        self._finish(sequence, FinishReason.ERROR)
        return True

    def get(self, sequence_id: str) -> Sequence | None:
        return self.queues.by_id.get(sequence_id)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before every sequence of the scheduler is in decode."""
        return self.queues.num_waiting_tokens

    def prompts_left(self) -> list[tuple[int, int]]:
        """(number of tokens, position of the first) of each prompt's part that is not computed yet, nor cached."""
        prompts = self.queues.prompts
        prefilling = [s for s in self.running if s.num_counted_tokens]
        left = [(s.num_uncomputed_tokens, s.num_computed_tokens) for s in prefilling]
        return left + [prompts.left(s) for s in self.waiting if s in prompts]

    # ---- steps

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest_step(self) -> StepPlan | None:
        """The step in flight that ends next."""
        return self._in_flight[0].plan if self._in_flight else None

    @property
    def steps_in_flight(self) -> list[StepPlan]:
        """Oldest first."""
        return [step.plan for step in self._in_flight]

    def schedule(self, admit_before: Rank | None = None) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or no block to compute it in.

        `admit_before` is the rank of a sequence in another queue that waits for blocks of this pool. A waiting sequence
        of lower rank is admitted only if it holds blocks: it has to run in order to free them. While a step is in
        flight, None may also mean that the next step needs a preemption.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "two steps are in flight"
        self.queues.prompts.set_cost(self.step_cost)
        draft = _Draft(StepBudget(self.config.max_batched_tokens))
        if not (self._plan_decodes(draft) and self._plan_prompts(draft, admit_before)):
            self._take_back(draft)
            if self._in_flight:
                return None
            if self._plan_running_and_preempt(draft) or not draft.chunks:
                self._admit(draft, admit_before)
        if not draft.chunks:
            return None
        self._admitted = draft.admitted
        plan = StepPlan(self._next_step_id, tuple(draft.chunks))
        self._in_flight.append(_StepInFlight(plan, draft.sequences))
        self._next_step_id += 1
        return plan

    def take_admitted(self) -> list[Sequence]:
        """The sequences that the newest step has admitted. The scheduler keeps none of them, so they can end."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def complete_step(self, output: StepOutput) -> list[TokenEvent]:
        """Take the results of the oldest step. A finished sequence leaves, unless the step ahead contains it.

        A sequence in `output.failed` ends with ERROR, without an event.
        """
        assert self._in_flight, "no step is in flight"
        plan, sequences = self._in_flight[0]
        assert plan.step_id == output.step_id, "another step is in flight"
        del self._in_flight[0]
        block_size, sampled, failed = self.block_size, output.sampled, output.failed
        events: list[TokenEvent] = []
        for sequence, (view, start, num_tokens, samples, _) in zip(sequences, plan.chunks, strict=True):
            end = sequence.num_computed_tokens = start + num_tokens
            has_failed = failed and view.sequence_id in failed
            if num_tokens > 1 and not has_failed:
                self.num_prefilled_tokens += num_tokens
            if sequence.finish_reason is not None:
                if end == sequence.num_planned_tokens:
                    self._leave(sequence)
                continue
            if has_failed:
                self._finish(sequence, FinishReason.ERROR)
                continue
            if end // block_size != sequence.num_registered_blocks:
                self.blocks.register_full_blocks(sequence)
            if sequence.num_counted_tokens:
                self.queues.update_counts(sequence)
            if not samples:
                continue
            token = sampled[view.sequence_id]
            token_ids = sequence.token_ids
            token_ids.append(token.token_id)
            reason = None
            if token.token_id in sequence.stop_token_ids or end + 1 >= sequence.max_num_tokens:
                reason = sequence.finish_reason_after(token.token_id, self.eos_token_ids)
                assert reason is not None
                self._finish(sequence, reason)
            events.append(_new_tuple(TokenEvent, (view.sequence_id, end - view.num_prompt_tokens, token, reason)))
        return events

    def fail_step(self) -> list[Sequence]:
        """End every sequence of the oldest step in flight, which failed. Returns those that had not ended before.

        A step that was planned ahead is dropped: its other sequences go back to their computed tokens.
        """
        assert self._in_flight, "no step is in flight"
        in_failed_step = set(self._in_flight[0].sequences)
        in_flight = dict.fromkeys(sequence for step in self._in_flight for sequence in step.sequences)
        self._in_flight.clear()
        failed = []
        for sequence in in_flight:
            sequence.num_planned_tokens = sequence.num_computed_tokens
            if sequence.finish_reason is not None:
                self._leave(sequence)
            elif sequence in in_failed_step:
                failed.append(sequence)
                self._finish(sequence, FinishReason.ERROR)
            else:
                self.queues.update_phase(sequence)
        return failed

    def _plan_decodes(self, draft: _Draft) -> bool:
        """Plan a token of every running sequence in decode. Returns False if the pool has too few blocks.

        This loop takes most of the scheduler's time.
        """
        block_size, chunks, sequences = self.block_size, draft.chunks, draft.sequences
        growing: list[Sequence] = []
        context = 0
        for sequence in self.running:
            start = sequence.num_planned_tokens
            wanted = len(sequence.token_ids) - start
            if wanted > 1 or start + 1 >= sequence.max_num_tokens:
                continue  # in prefill, or the promised token is the last one
            end = sequence.num_planned_tokens = start + 1
            context += end
            if end > len(sequence.block_table) * block_size:
                growing.append(sequence)
            chunks.append(_new_tuple(ScheduledChunk, (sequence.view, start, 1, True, wanted == 0)))
            sequences.append(sequence)
        # The newest token of a prompt that was just computed is no decode that a client waits for.
        is_waited_for = any(chunk.start >= chunk.sequence.num_prompt_tokens for chunk in chunks)
        draft.budget = self._budget(len(chunks), context, is_waited_for)
        draft.budget.take_decodes(len(chunks))
        blocks = self.pool.allocate(len(growing)) if growing else []
        if blocks is None:
            return False
        for sequence, block in zip(growing, blocks, strict=True):
            sequence.block_table.append(block)
        return True

    def _plan_prompts(self, draft: _Draft, admit_before: Rank | None) -> bool:
        """Give the rest of the budget to prompts in their order. Returns False if that takes a preemption first.

        Then the draft has chunks of running sequences in decode only.
        """
        self._admit_pulled(draft)
        admits, num_before = True, len(draft.chunks)
        while draft.budget.has_prompt_room:
            sequence = self._next_prompt(admits, admit_before)
            if sequence is None:
                break
            if not self._is_running(sequence):
                admits = self._admit_in_order(draft, sequence)
                if not admits:
                    continue
            else:
                num_tokens = self._tokens_within(draft.budget, sequence)
                if not self.blocks.grow(sequence, sequence.num_planned_tokens + num_tokens):
                    return bool(draft.admitted) or len(draft.chunks) > num_before
                self._add_chunk(draft, sequence, num_tokens)
            if self._is_running(sequence) and sequence in self.queues.prompts:
                break  # its chunk is all that the step has time or tokens for
        if self.queues.prefilling or len(draft.chunks) > num_before:
            return True
        return self._admit(draft, admit_before)

    def _is_running(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.queues.prefilling

    def _next_prompt(self, admits: bool, admit_before: Rank | None) -> Sequence | None:
        """The first prompt in the order, of those that may run now."""
        prompts, prefilling = self.queues.prompts, self.queues.prefilling.values()
        if not admits or len(self.running) >= self.config.max_running:
            return prompts.first_of(prefilling)
        if admit_before is None or not self.waiting or self.waiting[-1].rank < admit_before:
            return prompts.first()
        admissible = self.waiting[: bisect_left(self.waiting, admit_before, key=by_rank)]
        return prompts.first_of(chain(prefilling, admissible, self.queues.waiting_with_blocks))

    def _budget(self, num_decodes: int, context: int, is_waited_for: bool) -> StepBudget:
        """The budget of a step with these running decodes, and with the decodes that may be admitted."""
        pulled = self._admissible_pulled()
        budget = StepBudget(self.config.max_batched_tokens, num_decodes + len(pulled))
        if is_waited_for or pulled:
            context += sum(sequence.num_tokens for sequence in pulled)
            decodes = StepWork(num_decodes + len(pulled), context, 0, 0.0)
            budget.cost, budget.seconds = self.step_cost, self.step_limit_s - self.step_cost.seconds(decodes)
        return budget

    def _plan_running_and_preempt(self, draft: _Draft) -> bool:
        """Plan running sequences with too few blocks in the pool. Returns whether preemptions made enough room."""
        had_enough_blocks = True
        decodes = [sequence for sequence in self.running if _is_decode(sequence)]
        is_waited_for = any(sequence.num_tokens > sequence.request.num_prompt_tokens for sequence in decodes)
        draft.budget = self._budget(len(decodes), sum(sequence.num_tokens for sequence in decodes), is_waited_for)
        for sequence in list(self.running):
            if not sequence.block_table:
                continue  # preempted in this step by a sequence of higher rank
            wanted = self._tokens_within(draft.budget, sequence)
            if wanted <= 0:
                continue
            granted = self._grow_or_preempt(sequence, wanted)
            had_enough_blocks = had_enough_blocks and granted == wanted
            if granted:
                self._add_chunk(draft, sequence, granted)
            elif not draft.chunks and self._first_holder().rank < sequence.rank:
                # A pulled sequence of higher rank waits and holds blocks. Without this, both would wait for ever.
                self._preempt(sequence)
        return had_enough_blocks

    def _tokens_within(self, budget: StepBudget, sequence: Sequence) -> int:
        """The size of the next chunk of a sequence without a promised token."""
        if _is_decode(sequence):
            return 1
        start = sequence.num_planned_tokens
        return budget.prompt_tokens(sequence.num_tokens - start, start)

    def _add_chunk(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """Add a chunk of a sequence that has the blocks, and no promised token."""
        start = sequence.num_planned_tokens
        if _is_decode(sequence):
            draft.budget.take_decodes(1)
        else:
            draft.budget.take_prompt(num_tokens, start)
        draft.add(sequence, num_tokens)
        self.queues.take(sequence, start, num_tokens)

    def _take_back(self, draft: _Draft) -> None:
        """Undo the chunks of running sequences. Their tables keep new blocks, which the next chunks need."""
        for sequence, chunk in zip(draft.sequences, draft.chunks, strict=True):
            sequence.num_planned_tokens = chunk.start
            self.queues.update_phase(sequence)
        draft.sequences.clear()
        draft.chunks.clear()

    def _admit_pulled(self, draft: _Draft) -> None:
        for sequence in self._admissible_pulled():
            if not self.blocks.grow(sequence, sequence.num_tokens):
                break
            self._start(draft, sequence, 1)

    def _admissible_pulled(self) -> list[Sequence]:
        """Waiting sequences in decode with a place to run in that no waiting sequence of higher rank has a claim to."""
        num_free = self.config.max_running - len(self.running)
        if num_free >= len(self.waiting):
            return [sequence for sequence in self.queues.waiting_with_blocks if _is_decode(sequence)]
        return [sequence for sequence in self.waiting[:num_free] if sequence.block_table and _is_decode(sequence)]

    def _admit_in_order(self, draft: _Draft, sequence: Sequence) -> bool:
        """Admit the first prompt in the order. Returns False, and changes nothing, if it lacks blocks."""
        had_blocks = bool(sequence.block_table)
        if not had_blocks:
            # The last token is computed even if it is cached: the next token is sampled from its logits.
            self.blocks.hold_cached_prefix(sequence, sequence.num_tokens - 1)
        num_tokens = self._tokens_within(draft.budget, sequence)
        half_computed = self.queues.prefilling.values()
        fits = not half_computed or self._has_blocks_for_all_of((sequence, *half_computed))
        if not (fits and self.blocks.grow(sequence, sequence.num_planned_tokens + num_tokens)):
            if not had_blocks:
                self.blocks.drop(sequence)
            return False
        self._start(draft, sequence, num_tokens)
        return True

    def _start(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        self.queues.admit(sequence)
        self._add_chunk(draft, sequence, num_tokens)
        draft.admitted.append(sequence)

    def _has_blocks_for_all_of(self, prompts: Iterable[Sequence]) -> bool:
        """Whether all these prompts can be computed to their end. Readers keep the leased blocks of half a prompt."""
        wanted = (-(-prompt.num_tokens // self.block_size) - len(prompt.block_table) for prompt in prompts)
        return sum(wanted) <= self.pool.num_available

    def _admit(self, draft: _Draft, admit_before: Rank | None) -> bool:
        """Move waiting sequences to `running`, in rank order, up to the first that does not fit.

        Returns False, and admits nobody, if the first one needs a preemption while a step is in flight.
        """
        while draft.budget.num_tokens > 0 and len(self.running) < self.config.max_running:
            sequence = self._first_admissible(draft.budget, admit_before)
            if sequence is None:
                break
            had_blocks = bool(sequence.block_table)
            if not had_blocks:
                # The last token is computed even if it is cached: the next token is sampled from its logits.
                self.blocks.hold_cached_prefix(sequence, sequence.num_tokens - 1)
            num_tokens = self._tokens_within(draft.budget, sequence)
            end = sequence.num_computed_tokens + num_tokens
            has_blocks = self.blocks.grow(sequence, end)
            others_help = not has_blocks and self._others_have_blocks_for(sequence, end)
            if others_help and not self._in_flight:
                self._grow_by_preempting_others(sequence, end)
            elif not has_blocks:
                if not had_blocks:
                    self.blocks.drop(sequence)
                return not others_help or bool(draft.admitted)
            self._start(draft, sequence, num_tokens)
        return True

    def _first_admissible(self, budget: StepBudget, admit_before: Rank | None) -> Sequence | None:
        if not budget.has_prompt_room:
            return next(filter(_is_decode, self.queues.waiting_with_blocks), None)
        if self.waiting and (admit_before is None or self.waiting[0].rank < admit_before):
            return self.waiting[0]
        return self.queues.waiting_with_blocks[0] if self.queues.waiting_with_blocks else None

    # ---- blocks

    def hold_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """See `SequenceBlocks`. The counts of a sequence in the scheduler are not updated."""
        self.blocks.hold_cached_prefix(sequence, max_tokens)

    def drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.drop(sequence)

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate for `num_tokens` more tokens, preempting lower ranks. Returns the number of tokens with blocks."""
        while not self.blocks.grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max((*self.running[-1:], *self.queues.waiting_with_blocks[-1:]), key=by_rank)
            if victim.rank > sequence.rank:
                self._preempt(victim)
            else:
                num_blocks = len(sequence.block_table) + self.pool.num_available
                num_tokens = num_blocks * self.block_size - sequence.num_computed_tokens
        return num_tokens

    def _first_holder(self) -> Sequence:
        """The holder of blocks that ranks highest. All running sequences hold blocks."""
        return min((*self.running[:1], *self.queues.waiting_with_blocks[:1]), key=by_rank)

    def _others_have_blocks_for(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the blocks of the other waiting sequences would be enough for the first `num_tokens` tokens."""
        others = [other for other in self.queues.waiting_with_blocks if other is not sequence]
        gain = self.pool.num_available_without(block for other in others for block in other.block_table)
        return (len(sequence.block_table) + gain) * self.block_size >= num_tokens

    def _grow_by_preempting_others(self, sequence: Sequence, num_tokens: int) -> None:
        others = [other for other in self.queues.waiting_with_blocks if other is not sequence]
        while not self.blocks.grow(sequence, num_tokens):
            self._preempt(others.pop())

    @property
    def last_holder(self) -> Sequence | None:
        """The holder of blocks that ranks lowest."""
        return max((*self.running[-1:], *self.queues.waiting_with_blocks[-1:]), key=by_rank, default=None)

    def preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence, or of a waiting sequence with a pulled prompt. No step may be in
        flight. The scheduler preempts on its own for its own sequences; this is for a queue of the caller."""
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence, or of a waiting sequence with a pulled prompt."""
        assert not self._in_flight
        self.blocks.drop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.send_back(sequence)

    # ---- ends

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if sequence.num_planned_tokens > sequence.num_computed_tokens:
            self.queues.end(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.queues.leave(sequence)
        num_available = self.pool.num_available
        self.blocks.drop(sequence)
        self.num_released_blocks += self.pool.num_available - num_available

    def check(self) -> None:
        """The queues are right, and the chunks in flight lie between the computed and the planned tokens."""
        self.queues.check()
        assert len(self.running) <= self.config.max_running
        assert all(sequence.block_table for sequence in self.running)
        in_flight: dict[Sequence, int] = {}
        for plan, sequences in self._in_flight:
            for sequence, chunk in zip(sequences, plan.chunks, strict=True):
                at = in_flight.get(sequence, sequence.num_computed_tokens)
                assert chunk.start == at
                assert chunk.sequence is sequence.view
                in_flight[sequence] = at + chunk.num_tokens
        for sequence in self.queues.by_id.values():
            computed, planned = sequence.num_computed_tokens, sequence.num_planned_tokens
            assert planned == in_flight.get(sequence, computed)
            assert planned <= len(sequence.block_table) * self.block_size
            assert (sequence.finish_reason is None) or sequence in in_flight
            assert computed < sequence.num_tokens or sequence.finish_reason is not None
            assert planned < sequence.max_num_tokens
