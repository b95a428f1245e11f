"""Plans one step: which sequences get how many tokens, within the budget of the step and the blocks of the pool.

`Scheduler.schedule` calls the planner in this order; the rules are numbered in core/scheduling/scheduler.py:

    plan_decodes, plan_prompts      rule 1, without a preemption
    take_back                       if that would take a preemption
    plan_running_and_preempt        rule 2
    admit                           rule 3: waiting sequences by rank
    add_drafts                      rule 6
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import chain

from core.config import SchedulerConfig
from core.cost.step_cost import PRIOR, StepCost, StepWork, work_of
from core.scheduling.block_pool import BlockPool
from core.scheduling.drafts import MAX_DRAFTS, DraftChances, DraftGain, RowCosts, choose_drafts, has_proposal, saved_s
from core.scheduling.preemption import Preemption
from core.scheduling.sequence import Rank, Sequence, by_rank
from core.scheduling.sequence_blocks import SequenceBlocks
from core.scheduling.sequence_queues import SequenceQueues
from core.scheduling.step_budget import LIMIT_SHARE, StepBudget
from core.step import ScheduledChunk

# The constructor of a NamedTuple takes twice as long, and a step makes a chunk for each sequence.
_new_tuple = tuple.__new__


@dataclass(slots=True)
class NextStep:
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


class StepPlanner:
    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        blocks: SequenceBlocks,
        queues: SequenceQueues,
        preemption: Preemption,
    ) -> None:
        self.config, self.pool, self.blocks, self.queues = config, pool, blocks, queues
        self.block_size = preemption.block_size
        self.waiting, self.running = queues.waiting, queues.running
        self._preemption = preemption
        self.chances = DraftChances()
        self.row_costs = RowCosts()
        self.draft_gain = DraftGain()
        self.is_ahead = False  # the step is planned while another is in flight
        self.step_cost: StepCost = PRIOR  # the owner sets it as it learns

    @property
    def step_limit_s(self) -> float:
        """Of a step while sequences wait for a next token."""
        return LIMIT_SHARE * self.config.slo_itl_ms / 1e3

    def plan_decodes(self, step: NextStep) -> bool:
        """Plan a token of every running sequence in decode. Returns False if the pool has too few blocks.

        This loop takes most of the scheduler's time.
        """
        block_size, chunks, sequences = self.block_size, step.chunks, step.sequences
        growing: list[Sequence] = []
        context = 0
        for sequence in self.running:
            start = sequence.num_planned_tokens
            wanted = len(sequence.token_ids) - start
            if wanted > 1 or start + 1 >= sequence.plan_end:
                continue  # in prefill, or held back
            end = sequence.num_planned_tokens = start + 1
            context += end
            if end > len(sequence.block_table) * block_size:
                growing.append(sequence)
            chunks.append(_new_tuple(ScheduledChunk, (sequence.view, start, 1, True, wanted == 0, ())))
            sequences.append(sequence)
        # The newest token of a prompt that was just computed is no decode that a client waits for.
        is_waited_for = any(chunk.start >= chunk.sequence.num_prompt_tokens for chunk in chunks)
        step.budget = self._budget(len(chunks), context, is_waited_for)
        step.budget.take_decodes(len(chunks))
        blocks = self.pool.allocate(len(growing)) if growing else []
        if blocks is None:
            return False
        for sequence, block in zip(growing, blocks, strict=True):
            sequence.block_table.append(block)
        return True

    def plan_prompts(self, step: NextStep, admit_before: Rank | None) -> bool:
        """Give the rest of the budget to prompts in their order. Returns False if that takes a preemption first.

        Then the step has chunks of running sequences in decode only.
        """
        self._admit_pulled(step)
        admits, num_before = True, len(step.chunks)
        while step.budget.has_prompt_room:
            sequence = self._next_prompt(admits, admit_before)
            if sequence is None:
                break
            if not self._is_running(sequence):
                admits = self._admit_in_order(step, sequence)
                if not admits:
                    continue
            else:
                num_tokens = self._tokens_within(step.budget, sequence)
                if not self.blocks.grow(sequence, sequence.num_planned_tokens + num_tokens):
                    return bool(step.admitted) or len(step.chunks) > num_before
                self._add_chunk(step, sequence, num_tokens)
            if self._is_running(sequence) and sequence in self.queues.prompts:
                break  # its chunk is all that the step has time or tokens for
        if self.queues.prefilling or len(step.chunks) > num_before:
            return True
        return self.admit(step, admit_before)

    def _is_running(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.queues.prefilling

    def _next_prompt(self, admits: bool, admit_before: Rank | None) -> Sequence | None:
        """The first prompt in the order, of those that may run now."""
        prompts, prefilling = self.queues.prompts, self.queues.prefilling.values()
        if not admits or len(self.running) >= self.config.max_running:
            return prompts.first_of(prefilling)
        if admit_before is None or not self.waiting or self.waiting[-1].rank < admit_before:
            return prompts.first()
        first = prompts.first()
        if first is None or first.rank < admit_before or first.block_table:
            return first  # O(1), where `first_of` would look at every waiting sequence for each admitted one
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

    def plan_running_and_preempt(self, step: NextStep) -> bool:
        """Plan running sequences with too few blocks in the pool. Returns whether preemptions made enough room."""
        had_enough_blocks = True
        decodes = [sequence for sequence in self.running if _is_decode(sequence) and not sequence.is_held_back]
        is_waited_for = any(sequence.num_tokens > sequence.request.num_prompt_tokens for sequence in decodes)
        step.budget = self._budget(len(decodes), sum(sequence.num_tokens for sequence in decodes), is_waited_for)
        for sequence in list(self.running):
            if not sequence.block_table or sequence.is_held_back:
                continue  # preempted in this step by a sequence of higher rank, or moving
            wanted = self._tokens_within(step.budget, sequence)
            if wanted <= 0:
                continue
            granted = self._preemption.grow_or_preempt(sequence, wanted)
            had_enough_blocks = had_enough_blocks and granted == wanted
            if granted:
                self._add_chunk(step, sequence, granted)
            elif not (step.chunks or sequence.is_moving) and self._preemption.first_holder().rank < sequence.rank:
                # A pulled sequence of higher rank waits and holds blocks. Without this, both would wait for ever.
                self._preemption.preempt(sequence)
        return had_enough_blocks

    def _tokens_within(self, budget: StepBudget, sequence: Sequence) -> int:
        """The size of the next chunk of a sequence without a promised token."""
        if _is_decode(sequence):
            return 1
        start = sequence.num_planned_tokens
        return budget.prompt_tokens(sequence.num_tokens - start, start)

    def _add_chunk(self, step: NextStep, sequence: Sequence, num_tokens: int) -> None:
        """Add a chunk of a sequence that has the blocks, and no promised token."""
        start = sequence.num_planned_tokens
        if _is_decode(sequence):
            step.budget.take_decodes(1)
        else:
            step.budget.take_prompt(num_tokens, start)
        step.add(sequence, num_tokens)
        self.queues.take(sequence, start, num_tokens)

    def learn_draft_gain(self, has_proposals: bool) -> None:
        """From the newest output, once its tokens and proposals are known."""
        counts, saved = self._drafts_behind_output() if has_proposals else ([], 0.0)
        self.draft_gain.learn(counts, saved)

    def _drafts_behind_output(self) -> tuple[list[int], float]:
        """The drafts that a step would take if it were planned now and none were in flight, and what they save."""
        decodes = [s for s in self.running if len(s.token_ids) - s.num_planned_tokens <= 1 and not s.is_held_back]
        proposals = [sequence for sequence in decodes if has_proposal(sequence)]
        if not proposals:
            return [], 0.0
        work = StepWork(len(decodes), sum(sequence.num_tokens for sequence in decodes), 0, 0.0)
        limits = [min(MAX_DRAFTS, len(sequence.proposal.token_ids)) for sequence in proposals]
        return self._num_drafts(proposals, limits, len(decodes), work, self.step_limit_s)

    def can_gain_by_drafts(self, step: NextStep) -> bool:
        """Whether another step like this one would take drafts that are certain to be right."""
        work = work_of(step.chunks)
        num_samples = sum(chunk.samples for chunk in step.chunks)
        row_s = self.row_costs.row_s(work.num_decodes, self.step_cost.sequence_s)
        return any(choose_drafts([[1.0] * MAX_DRAFTS], num_samples, self.step_cost.seconds(work), row_s, math.inf))

    def add_drafts(self, step: NextStep) -> None:
        """Give decodes with guesses the rows that they gain by, of what the step has left. Takes only free blocks."""
        budget, block_size = step.budget, self.block_size
        places, limits = [], []
        for place, (sequence, chunk) in enumerate(zip(step.sequences, step.chunks, strict=True)):
            if not has_proposal(sequence) or chunk.num_tokens != 1 or not chunk.samples:
                continue
            end = chunk.start + 1
            num_slots = len(sequence.block_table) * block_size - end
            if num_slots < MAX_DRAFTS and self.pool.num_free > len(self.running):
                num_slots += block_size
            limit = min(MAX_DRAFTS, len(sequence.proposal.token_ids), num_slots, sequence.plan_end - end - 1)
            if limit > 0:
                places.append(place)
                limits.append(limit)
        if not places:
            return
        work = work_of(step.chunks)
        spare_s = budget.seconds if budget.cost is not None else self.step_limit_s
        sequences = [step.sequences[place] for place in places]
        num_samples = sum(chunk.samples for chunk in step.chunks)
        counts, _ = self._num_drafts(sequences, limits, num_samples, work, spare_s)
        num_rows = max(0, max(self.config.max_running, 1 + MAX_DRAFTS) - len(step.chunks))  # a runner is built for all
        for place, sequence, count in zip(places, sequences, counts, strict=True):
            count = min(count, budget.num_tokens, num_rows)
            end = step.chunks[place].start + 1 + count
            if count and self.blocks.grow(sequence, end):
                budget.take_decodes(count)
                num_rows -= count
                step.chunks[place] = step.chunks[place]._replace(drafts=sequence.proposal.token_ids[:count])

    def _num_drafts(
        self, sequences: list[Sequence], limits: list[int], num_tokens: int, work: StepWork, spare_s: float
    ) -> tuple[list[int], float]:
        """The number of drafts of each sequence, and the seconds that they save."""
        cost = self.step_cost
        chances = [self.chances.cumulative(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]
        step_s, row_s = cost.seconds(work), self.row_costs.row_s(work.num_decodes, cost.sequence_s)
        counts = choose_drafts(chances, num_tokens, step_s, row_s, spare_s)
        return counts, saved_s(chances, counts, num_tokens, step_s, row_s)

    def take_back(self, step: NextStep) -> None:
        """Undo the chunks of running sequences. Their tables keep new blocks, which the next chunks need."""
        for sequence, chunk in zip(step.sequences, step.chunks, strict=True):
            sequence.num_planned_tokens = chunk.start
            self.queues.update_phase(sequence)
        step.sequences.clear()
        step.chunks.clear()

    def _admit_pulled(self, step: NextStep) -> None:
        for sequence in self._admissible_pulled():
            if not self.blocks.grow(sequence, sequence.num_tokens):
                break
            self._start(step, sequence, 1)

    def _admissible_pulled(self) -> list[Sequence]:
        """Waiting sequences in decode with a place to run in that no waiting sequence of higher rank has a claim to."""
        num_free = max(0, self.config.max_running - len(self.running))  # the limit may be lower than when they started
        if num_free >= len(self.waiting):
            return [sequence for sequence in self.queues.waiting_with_blocks if _is_decode(sequence)]
        return [sequence for sequence in self.waiting[:num_free] if sequence.block_table and _is_decode(sequence)]

    def _admit_in_order(self, step: NextStep, sequence: Sequence) -> bool:
        """Admit the first prompt in the order. Returns False, and changes nothing, if it lacks blocks."""
        had_blocks = bool(sequence.block_table)
        if not had_blocks:
            # The last token is computed even if it is cached: the next token is sampled from its logits.
            self.blocks.hold_cached_prefix(sequence, sequence.num_tokens - 1)
        num_tokens = self._tokens_within(step.budget, sequence)
        end = sequence.num_planned_tokens + num_tokens
        if not (self._has_room_for_all_of(sequence) and self.blocks.grow(sequence, end)):
            if not had_blocks:
                self.blocks.drop(sequence)
            return False
        self._start(step, sequence, num_tokens)
        return True

    def _start(self, step: NextStep, sequence: Sequence, num_tokens: int) -> None:
        self.queues.admit(sequence)
        sequence.num_recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_planned_tokens)
        self._add_chunk(step, sequence, num_tokens)
        step.admitted.append(sequence)

    def _has_room_for_all_of(self, sequence: Sequence) -> bool:
        """Whether the pool has blocks for the rest of this prompt and of all half-computed ones, and a block for the
        next tokens of each running sequence. Without running sequences, a prompt may start with less.

        A prompt that starts with less is preempted and computed again, or preempts others. Readers keep the leased
        blocks of half a prompt.
        """
        if not self.running:
            return True
        prompts = (sequence, *self.queues.prefilling.values())
        wanted = (-(-prompt.num_tokens // self.block_size) - len(prompt.block_table) for prompt in prompts)
        return sum(wanted) + len(self.running) <= self.pool.num_available

    def admit(self, step: NextStep, admit_before: Rank | None) -> bool:
        """Move waiting sequences to `running`, in rank order, up to the first that does not fit.

        Returns False, and admits no sequence, if the first one needs a preemption while a step is in flight.
        """
        while step.budget.num_tokens > 0 and len(self.running) < self.config.max_running:
            sequence = self._first_admissible(step.budget, admit_before)
            if sequence is None:
                break
            had_blocks = bool(sequence.block_table)
            if not had_blocks:
                # The last token is computed even if it is cached: the next token is sampled from its logits.
                self.blocks.hold_cached_prefix(sequence, sequence.num_tokens - 1)
            num_tokens = self._tokens_within(step.budget, sequence)
            end = sequence.num_computed_tokens + num_tokens
            if not (had_blocks or self._has_room_for_all_of(sequence)):
                self.blocks.drop(sequence)
                return True
            has_blocks = self.blocks.grow(sequence, end)
            others_help = not has_blocks and self._preemption.others_have_blocks_for(sequence, end)
            if others_help and not self.is_ahead:
                self._preemption.grow_by_preempting_others(sequence, end)
            elif not has_blocks:
                if not had_blocks:
                    self.blocks.drop(sequence)
                return not others_help or bool(step.admitted)
            self._start(step, sequence, num_tokens)
        return True

    def _first_admissible(self, budget: StepBudget, admit_before: Rank | None) -> Sequence | None:
        if not budget.has_prompt_room:
            return next(filter(_is_decode, self.queues.waiting_with_blocks), None)
        if self.waiting and (admit_before is None or self.waiting[0].rank < admit_before):
            return self.waiting[0]
        return self.queues.waiting_with_blocks[0] if self.queues.waiting_with_blocks else None
