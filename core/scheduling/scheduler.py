"""The scheduler of prefill and decode workers.

Each step computes tokens of sequences, up to a token budget. A step with sequences that wait for their next token has
a time limit, too (core/scheduling/step_budget.py):

    1. Each running sequence in decode gets 1 token. Waiting sequences that have pulled their prompts come next, unless
       waiting prompts of higher rank (priority, then arrival) have a claim to the free places. Prompts get the budget
       that the decodes leave, in the order of core/scheduling/prompt_order.py, whether they run or wait: a short prompt
       passes a long one that is half computed.
    2. If a running sequence of the step lacks blocks, the step is planned by rank: each running sequence gets its
       blocks, and the scheduler preempts the lowest-ranked holder of blocks. This sequence loses its blocks and is
       recomputed later, mostly from the prefix cache. If no holder ranks lower, the chunk shrinks to the available
       blocks, or waits.
    3. While sequences run, a prompt starts only if the pool has blocks for the rest of it and of every half-computed
       prompt, and one for the next tokens of each running sequence. If the first waiting prompt in the order lacks
       blocks, the step admits no other prompt. If, besides, no prompt is half computed, the step admits waiting
       sequences by rank, up to the first that does not fit. A caller with a queue of its own passes the rank of its
       first sequence; waiting sequences of lower rank then get no first blocks.

The highest-ranked holder can take the blocks of every other holder, and `add` refuses a sequence that is larger than
the pool. So a step always makes progress, unless leases or reservations keep the blocks. No prompt waits for ever for
all its blocks: once it is first in the order, no other is admitted, running sequences end, and with none running it
starts with the blocks that there are.

One step may be planned ahead, while another is in flight. It counts on the tokens of the step in flight:

    4. A sequence whose promised token is certain to be its last is left out, as is one that is paused for a move. A
       stop token is not certain: if the step in flight ends a sequence, the result of the step ahead is dropped, as
       after an abort.
    5. No sequence is preempted ahead. If a step needs a preemption, it is planned after the step in flight.

A runner may propose guesses of the next tokens:

    6. A sequence in decode may compute guessed tokens, its drafts, in what the step has left of tokens, time and free
       blocks, as far as core/scheduling/drafts.py expects more tokens per second. Drafts are no tokens of the sequence:
       those that turn out right become tokens when the step ends, up to the first that ends the sequence. While a step
       with drafts is in flight, or the next step is expected to gain by drafts, no step is planned ahead.

A sequence that ends while a step contains it keeps its blocks until the step ends: the runner may still write to them.
A sequence that could not be computed ends like that, and its blocks enter no prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from core.config import SchedulerConfig
from core.cost.step_cost import StepCost, StepWork
from core.errors import InvalidRequest, QueueFull
from core.lifecycle import FinishReason
from core.scheduling.block_pool import BlockPool
from core.scheduling.preemption import Preemption
from core.scheduling.prompt_queue import PromptQueue
from core.scheduling.sequence import Rank, Sequence
from core.scheduling.sequence_blocks import SequenceBlocks
from core.scheduling.sequence_queues import SequenceQueues
from core.scheduling.step_budget import StepBudget
from core.scheduling.step_planner import NextStep, StepPlanner
from core.step import NO_PROPOSAL, Proposal, SampledToken, StepOutput, StepPlan, TokenEvent

MAX_STEPS_IN_FLIGHT = 2  # steps of a worker in flight; beyond: the next one is planned after the oldest

# The constructor of a NamedTuple takes twice as long, and a step makes a chunk and an event for each sequence.
_new_tuple = tuple.__new__


class _StepInFlight(NamedTuple):
    plan: StepPlan
    sequences: list[Sequence]  # of the chunks, in order
    has_drafts: bool


class Scheduler:
    """Decides each step. Owns the added sequences and their blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        block_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.blocks = SequenceBlocks(pool, block_size)
        self.queues = SequenceQueues(PromptQueue(self.blocks))
        self.waiting, self.running = self.queues.waiting, self.queues.running
        self._preemption = Preemption(pool, self.blocks, self.queues, block_size)
        self._planner = StepPlanner(config, pool, self.blocks, self.queues, self._preemption)
        self.set_config(config)
        self._admitted: list[Sequence] = []  # by the newest step
        self._in_flight: list[_StepInFlight] = []  # oldest first
        self._next_step_id = 0
        self.speculates = True  # whether the runner may propose tokens
        self._has_proposals = False  # the newest output had some
        self.num_drafts = 0  # guessed tokens that steps have computed
        self.num_right_drafts = 0  # ... and that were right
        self.num_prefilled_tokens = 0  # in chunks of more than one token
        self.num_released_blocks = 0  # that became available when a sequence ended

    def set_config(self, config: SchedulerConfig) -> None:
        """Plan the next steps within these limits. What runs and what waits beyond them goes on, and nothing joins."""
        assert config.max_running > 0, "the sizes are automatic: see SchedulerConfig.on_device"
        self.config = self._planner.config = config
        self._most_running = max(config.max_running, len(self.running))  # until the next change

    @property
    def step_cost(self) -> StepCost:
        """The prices by which steps are planned. The owner sets them as it learns."""
        return self._planner.step_cost

    @step_cost.setter
    def step_cost(self, step_cost: StepCost) -> None:
        self._planner.step_cost = step_cost

    @property
    def step_limit_s(self) -> float:
        """The limit of a step while sequences wait for their next token."""
        return self._planner.step_limit_s

    # ---- sequences

    def add(self, sequence: Sequence, *, has_waited: bool = False) -> None:
        """Queue a sequence. A sequence with computed tokens must hold their blocks. `has_waited`: `refuse` has been
        called, and the sequence has waited in another queue since, which has a bound of its own.

        Raises `QueueFull`, or `InvalidRequest` for a sequence that is larger than the pool. The caller then releases
        the blocks of the sequence.
        """
        assert sequence.sequence_id not in self.queues.by_id, f"{sequence.sequence_id} was added twice"
        assert sequence.num_tokens < sequence.max_num_tokens, f"{sequence.sequence_id} has all its tokens"
        assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.sequence_id} has nothing to compute"
        assert sequence.num_computed_tokens <= len(sequence.block_table) * self.block_size
        if has_waited or sequence.block_table:  # then it has waited, too
            self.refuse_oversized(sequence)
        else:
            self.refuse(sequence)
        sequence.num_planned_tokens = sequence.num_computed_tokens
        sequence.stop_token_ids = sequence.request.sampling.stop_tokens(self.eos_token_ids)
        self.queues.add(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """Raise what `add` would raise."""
        self.refuse_oversized(sequence)
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} sequences wait already (max_waiting)")

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

    def record_drafts(self, plan: StepPlan, work: StepWork, seconds: float) -> None:
        """Learn the price of drafts from a step with some. `work`: without them."""
        if work.prefill_tokens:
            return  # what the prompts took is not known well enough
        cost, known_s = self.step_cost, self.step_cost.seconds(work)
        self._planner.row_costs.record(work.num_decodes, plan.num_drafts, seconds - known_s, cost.sequence_s)

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
        planner, step = self._planner, NextStep(StepBudget(self.config.max_batched_tokens))
        if self._in_flight and (self._in_flight[0].has_drafts or planner.draft_gain.is_worth_a_wait):
            return None
        self.queues.prompts.set_cost(planner.step_cost)
        planner.is_ahead = bool(self._in_flight)
        if not (planner.plan_decodes(step) and planner.plan_prompts(step, admit_before)):
            planner.take_back(step)
            if self._in_flight:
                return None
            if planner.plan_running_and_preempt(step) or not step.chunks:
                planner.admit(step, admit_before)
        if not step.chunks:
            return None
        if self._has_proposals and not self._in_flight:
            planner.add_drafts(step)
        self._admitted = step.admitted
        plan = StepPlan(self._next_step_id, tuple(step.chunks), self.speculates and planner.can_gain_by_drafts(step))
        self._in_flight.append(_StepInFlight(plan, step.sequences, self._has_proposals and plan.num_drafts > 0))
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
        plan, sequences, _ = self._in_flight[0]
        assert plan.step_id == output.step_id, "another step is in flight"
        del self._in_flight[0]
        block_size, sampled, failed, proposed = self.block_size, output.sampled, output.failed, output.proposed
        has_news = self._has_proposals or proposed
        self._has_proposals = bool(proposed)
        events: list[TokenEvent] = []
        for sequence, (view, start, num_tokens, samples, _, drafts) in zip(sequences, plan.chunks, strict=True):
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
            if drafts:
                events += self._take_several(sequence, sampled[view.sequence_id], len(drafts), proposed)
                continue
            if end // block_size != sequence.num_registered_blocks:
                self.blocks.register_full_blocks(sequence)
            if sequence.num_counted_tokens:
                self.queues.update_counts(sequence)
            if not samples:
                continue
            (token,) = sampled[view.sequence_id]
            token_ids = sequence.token_ids
            token_ids.append(token.token_id)
            reason = None
            if token.token_id in sequence.stop_token_ids or end + 1 >= sequence.max_num_tokens:
                reason = sequence.finish_reason_after(token.token_id, self.eos_token_ids)
                assert reason is not None
                self._finish(sequence, reason)
            elif has_news:
                self._planner.chances.learn(sequence, (token.token_id,), proposed.get(view.sequence_id, NO_PROPOSAL))
            events.append(_new_tuple(TokenEvent, (view.sequence_id, end - view.num_prompt_tokens, token, reason)))
        self._planner.learn_draft_gain(self._has_proposals)
        return events

    def _take_several(
        self, sequence: Sequence, sampled: Items[SampledToken], num_drafts: int, proposed: Mapping[str, Proposal]
    ) -> list[TokenEvent]:
        """Take the tokens of a chunk with drafts, up to the first that ends the sequence."""
        name, events = sequence.sequence_id, []
        for token in sampled:
            index = len(sequence.token_ids) - sequence.request.num_prompt_tokens
            sequence.token_ids.append(token.token_id)
            reason = sequence.finish_reason_after(token.token_id, self.eos_token_ids)
            events.append(TokenEvent(name, index, token, reason))
            if reason is not None:
                break
        sequence.num_computed_tokens = sequence.num_planned_tokens = len(sequence.token_ids) - 1
        self.blocks.register_full_blocks(sequence)
        for count in (sequence, self):
            count.num_drafts += num_drafts
            count.num_right_drafts += len(events) - 1
        self._planner.chances.learn(
            sequence, [event.token.token_id for event in events], proposed.get(name, NO_PROPOSAL)
        )
        if reason is not None:
            self._finish(sequence, reason)
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

    # ---- blocks

    def hold_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """See `SequenceBlocks`. The counts of a sequence in the scheduler are not updated."""
        self.blocks.hold_cached_prefix(sequence, max_tokens)

    def drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.drop(sequence)

    @property
    def last_holder(self) -> Sequence | None:
        """The holder of blocks that ranks lowest."""
        return self._preemption.last_holder

    def preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence, or of a waiting sequence with a pulled prompt. No step may be in
        flight. The scheduler preempts on its own for its own sequences; this is for a queue of the caller."""
        assert not self._in_flight
        self._preemption.preempt(sequence)

    def give_up_last_block(self, sequence: Sequence) -> None:
        """Compute the tokens of the partly filled block again, in another block: a peer may read this one still. No
        step in flight may contain the sequence."""
        assert sequence.num_planned_tokens == sequence.num_computed_tokens
        num_full, num_left = divmod(sequence.num_computed_tokens, self.block_size)
        if not num_full:  # only waiting sequences hold no block
            sequence.num_lost_tokens = num_left
            self.blocks.drop(sequence)
            self.queues.send_back(sequence)
        elif num_left:
            self.pool.release(sequence.keep_blocks(num_full, self.block_size))
            sequence.num_recomputed_tokens += num_left
            self.queues.rewind(sequence)

    @property
    def num_preemptions(self) -> int:
        return self._preemption.num_preemptions

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
        assert len(self.running) <= self._most_running
        assert all(sequence.block_table for sequence in self.running)
        in_flight: dict[Sequence, int] = {}
        for plan, sequences, _ in self._in_flight:
            for sequence, chunk in zip(sequences, plan.chunks, strict=True):
                at = in_flight.get(sequence, sequence.num_computed_tokens)
                assert chunk.start == at
                assert chunk.sequence is sequence.view
                assert chunk.start + chunk.num_rows <= len(sequence.block_table) * self.block_size
                assert not chunk.drafts or len(self._in_flight) == 1
                in_flight[sequence] = at + chunk.num_tokens
        for sequence in self.queues.by_id.values():
            computed, planned = sequence.num_computed_tokens, sequence.num_planned_tokens
            assert planned == in_flight.get(sequence, computed)
            assert planned <= len(sequence.block_table) * self.block_size
            assert (sequence.finish_reason is None) or sequence in in_flight
            assert computed < sequence.num_tokens or sequence.finish_reason is not None
            assert planned < sequence.max_num_tokens
