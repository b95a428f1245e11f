"""The scheduler and its pool against a model of the KV memory.

The model records for each slot the prefix that its KV was computed from. Every slot that a chunk reads must hold the
prefix of its own sequence, so the test sees each read of a stale, evicted or foreign block. A chunk may write only
blocks that no other sequence holds, that no peer reads, and that are neither reserved nor in the prefix cache. A step
may be planned while another is in flight. Sequences of a step may fail alone. Decodes compute guesses, right and wrong
ones, in all the room that a step has.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence as Items
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.config import SchedulerConfig
from core.cost.step_cost import StepWork, work_of
from core.errors import InvalidRequest, OutOfDeviceMemory, QueueFull
from core.lifecycle import FinishReason
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Rank, Sequence
from core.scheduling.step_budget import MIN_PROMPT_TOKENS
from core.step import Proposal, SampledToken, ScheduledChunk, StepOutput, StepPlan, TokenEvent
from tests.property.shadow_memory import Content, ShadowMemory, contents

BLOCK_SIZE = 4
EOS = 0
TOKENS = (1, 2, 1, 2, 1, 2, EOS)  # few values, so that sequences share prefixes
SHARED = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2, 2, 1, 1)  # prompts start with a part of it

picks = st.integers(0, 10_000)
prompts = st.builds(
    lambda shared, own: (*SHARED[:shared], *own) or (1,),
    st.integers(0, len(SHARED)),
    st.lists(st.integers(1, 2), max_size=12),
)
requests: dict[str, Any] = {
    "prompt": prompts,
    "priority": st.integers(0, 2),
    "salt": st.sampled_from(["", "", "tenant"]),
    "tenant": st.sampled_from(["", "a", "b"]),
    "max_tokens": st.integers(1, 16),
}


@dataclass(eq=False)
class Pull:
    """A hand-off to this pool: the sequence holds the cached blocks, and `reserved` are the target blocks."""

    sequence: Sequence
    reserved: list[int]


@dataclass(eq=False)
class Lease:
    """Blocks that a peer reads, and their contents, which must not change before the end of the lease."""

    blocks: list[int]
    expected: list[list[Content]]  # of the offered slots only


def sample(chunk: ScheduledChunk, draw: random.Random) -> tuple[SampledToken, ...]:
    sampled = [draw.choice(TOKENS)]
    for guess in chunk.drafts:
        if guess != sampled[-1]:
            break
        sampled.append(draw.choice(TOKENS))
    return tuple(map(SampledToken, sampled))


def take_all(chances: Items[Items[float]], *_: float) -> list[int]:
    """In place of `choose_drafts`."""
    return [len(of_one) for of_one in chances]


def computed_part(plan: StepPlan, failed: Set[str]) -> StepPlan:
    return replace(plan, chunks=tuple(chunk for chunk in plan.chunks if chunk.sequence.sequence_id not in failed))


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patches = patch("core.scheduling.step_planner.choose_drafts", take_all)
        self.patches.start()

    @initialize(
        num_blocks=st.integers(4, 10),
        max_running=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        max_waiting=st.integers(1, 8),
        slo_itl_ms=st.sampled_from([1000.0, 35.0, 1.0]),
    )
    def start(self, num_blocks: int, max_running: int, spare_budget: int, max_waiting: int, slo_itl_ms: float) -> None:
        self.pool = BlockPool(num_blocks)
        config = SchedulerConfig(max_running + spare_budget, max_running, max_waiting, slo_itl_ms)
        self.scheduler = Scheduler(config, self.pool, BLOCK_SIZE, frozenset({EOS}))
        self.memory = ShadowMemory(num_blocks, BLOCK_SIZE)
        self.sequences: dict[str, Sequence] = {}  # in the scheduler; ended ones only while a step contains them
        self.steps: list[StepPlan] = []  # in flight, oldest first
        self.pulls: list[Pull] = []
        self.leases: list[Lease] = []
        self.born: list[Sequence] = []
        self.failed_before: set[str] = set()  # in the step that ended last

    @rule(max_running=st.integers(1, 5), spare_budget=st.integers(0, 12), max_waiting=st.integers(1, 8))
    def change_limits(self, max_running: int, spare_budget: int, max_waiting: int) -> None:
        """Also below what runs and waits, and also while steps are in flight."""
        slo_itl_ms = self.scheduler.config.slo_itl_ms
        self.scheduler.set_config(SchedulerConfig(max_running + spare_budget, max_running, max_waiting, slo_itl_ms))

    def holders(self) -> Counter[int]:
        tables = [s.block_table for s in self.sequences.values()] + [pull.sequence.block_table for pull in self.pulls]
        return Counter(block for table in tables for block in table)

    # ---- sequences

    def new_sequence(
        self,
        prompt: tuple[int, ...],
        priority: int,
        salt: str,
        tenant: str,
        max_tokens: int,
        sample_limit: int | None = None,
    ) -> Sequence:
        arrival = len(self.born) + 1
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(
            f"s{arrival}", prompt, len(prompt), sampling, priority=priority, cache_salt=salt, tenant=tenant
        )
        self.born.append(Sequence(request, arrival, sample_limit))
        return self.born[-1]

    def find(self, sequence: Sequence) -> list[int]:
        """The cached blocks that `sequence` would share."""
        found = self.pool.match_prefix(sequence.full_blocks(BLOCK_SIZE), sequence.request.cache_salt)
        return [cached.block for cached in found]

    @rule(**requests, sample_limit=st.sampled_from([None, None, 1, 2]))
    def add(
        self, prompt: tuple[int, ...], priority: int, salt: str, tenant: str, max_tokens: int, sample_limit: int | None
    ) -> None:
        self.hand_over(self.new_sequence(prompt, priority, salt, tenant, max_tokens, sample_limit))

    def hand_over(self, sequence: Sequence) -> None:
        """Add a sequence to the scheduler. If the scheduler refuses it, release its blocks."""
        full = not sequence.block_table and len(self.scheduler.waiting) >= self.scheduler.config.max_waiting
        try:
            self.scheduler.add(sequence)
        except QueueFull:
            assert full
            self.pool.release(sequence.block_table)
        except InvalidRequest:
            assert sequence.request.max_total_tokens > self.pool.num_blocks * BLOCK_SIZE
            assert not sequence.block_table
        else:
            assert not full
            self.sequences[sequence.sequence_id] = sequence

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        sequence = list(self.sequences.values())[pick % len(self.sequences)]
        reason = sequence.finish_reason
        assert self.scheduler.abort(sequence.sequence_id) == (reason is None)
        assert not self.scheduler.abort(sequence.sequence_id)
        assert sequence.finish_reason is (reason or FinishReason.ERROR)
        self.forget_those_that_left([sequence])

    # ---- hand-offs in

    @rule(**requests)
    def begin_pull(self, prompt: tuple[int, ...], priority: int, salt: str, tenant: str, max_tokens: int) -> None:
        sequence = self.new_sequence(prompt, priority, salt, tenant, max_tokens)
        if sequence.request.max_total_tokens - 1 > self.pool.num_blocks * BLOCK_SIZE:
            return
        self.scheduler.hold_cached_prefix(sequence, len(prompt))
        reserved = self.pool.reserve(-(-len(prompt) // BLOCK_SIZE) - len(sequence.block_table))
        if reserved is None:
            self.pool.release(sequence.block_table)
        else:
            self.pulls.append(Pull(sequence, reserved))

    @precondition(lambda self: self.pulls)
    @rule(pick=picks, arrives=st.sampled_from([True, True, True, False]), token_id=st.sampled_from(TOKENS))
    def end_pull(self, pick: int, arrives: bool, token_id: int) -> None:
        pull = self.pulls.pop(pick % len(self.pulls))
        sequence = pull.sequence
        if not arrives:
            self.pool.cancel_reservation(pull.reserved)
            self.pool.release(sequence.block_table)
            return
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        sequence.block_table += pull.reserved
        self.memory.write(sequence, start, end)
        self.pool.arrive(pull.reserved)
        sequence.num_computed_tokens = end
        sequence.token_ids.append(token_id)
        if sequence.finish_reason_after(token_id, frozenset({EOS})) is None:
            self.hand_over(sequence)
        else:
            self.pool.release(sequence.block_table)

    # ---- hand-offs out

    def leasable(self) -> list[Sequence]:
        """A sequence that has failed stays while a step ahead contains it, and nobody offers its blocks."""
        return [sequence for name, sequence in self.sequences.items() if name not in self.failed_before]

    @precondition(lambda self: self.leasable())
    @rule(pick=picks, share=picks)
    def lease_full_blocks(self, pick: int, share: int) -> None:
        sequences = self.leasable()
        sequence = sequences[pick % len(sequences)]
        num_full = sequence.num_computed_tokens // BLOCK_SIZE
        self.lease(sequence, share % (num_full + 1) * BLOCK_SIZE)

    def lease(self, sequence: Sequence, num_tokens: int) -> None:
        blocks = sequence.block_table[: -(-num_tokens // BLOCK_SIZE)]
        offered = contents(sequence, 0, num_tokens)
        expected = [offered[at : at + BLOCK_SIZE] for at in range(0, num_tokens, BLOCK_SIZE)]
        self.pool.lease(blocks)
        self.leases.append(Lease(list(blocks), expected))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def unlease(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        for block, expected in zip(lease.blocks, lease.expected, strict=True):
            assert self.memory.blocks[block][: len(expected)] == expected, f"leased block {block} was overwritten"
        self.pool.unlease(lease.blocks)

    # ---- steps

    @precondition(lambda self: len(self.steps) < 2)
    @rule()
    def begin_step(self) -> None:
        self.schedule(None)

    @precondition(lambda self: len(self.steps) < 2)
    @rule(priority=st.integers(0, 2), pick=picks)
    def begin_step_while_another_waits(self, priority: int, pick: int) -> None:
        """A sequence in another queue waits for blocks, too."""
        admit_before = (priority, 0.0, pick % (len(self.born) + 2))
        without_blocks = [s for s in self.scheduler.waiting if not s.block_table]
        self.schedule(admit_before)
        assert all(s.rank < admit_before for s in without_blocks if s in self.scheduler.running)

    def schedule(self, admit_before: Rank | None) -> None:
        preemptions = self.scheduler.num_preemptions
        before = {name: sequence.num_planned_tokens for name, sequence in self.sequences.items()}
        num_running = len(self.scheduler.running)
        plan = self.scheduler.schedule(admit_before)
        most_running = max(self.scheduler.config.max_running, num_running)
        assert len(self.scheduler.running) <= most_running, "a sequence joins beyond the limit"
        if self.steps:
            assert self.scheduler.num_preemptions == preemptions, "a step ahead preempts a sequence"
            if plan is None:
                after = {name: sequence.num_planned_tokens for name, sequence in self.sequences.items()}
                assert after == before, "a refused step changes the plan"
                return
        if plan is None and admit_before is not None:
            behind = [s.rank >= admit_before and not s.block_table for s in self.sequences.values()]
            assert all(behind) or self.leases or self.pulls, "no step runs, although no pull or lease keeps a block"
            return
        if plan is None:
            if self.sequences:
                assert self.leases or self.pulls, "no step runs, although no pull or lease keeps a block"
            assert not self.scheduler.running or self.pool.num_available == 0, "no step runs despite available blocks"
            return
        self.steps.append(plan)
        config = self.scheduler.config
        assert 0 < plan.num_tokens <= max(config.max_batched_tokens, len(plan.chunks))
        assert len({chunk.sequence.sequence_id for chunk in plan.chunks}) == len(plan.chunks) <= most_running
        if self.scheduler.num_preemptions == preemptions:
            self.assert_decodes_are_planned(plan)
            self.assert_tokens_come_in_time(plan)
        self.assert_chunks_are_safe(plan)

    def assert_decodes_are_planned(self, plan: StepPlan) -> None:
        if self.pool.num_available == 0:
            return
        if len(self.steps) == 2:
            return self.assert_decodes_go_on(plan)
        planned = {chunk.sequence.sequence_id for chunk in plan.chunks}
        decoding = [s for s in self.scheduler.running if s.num_uncomputed_tokens == 1]
        assert all(sequence.sequence_id in planned for sequence in decoding), "a decode waits behind a prefill"

    def assert_tokens_come_in_time(self, plan: StepPlan) -> None:
        """A step with sequences that wait for their next token keeps its limit, unless it takes few prompt tokens."""
        if any(c.num_tokens == 1 and c.start >= c.sequence.num_prompt_tokens for c in plan.chunks):
            work = work_of(plan.chunks)
            one_token_s = self.scheduler.step_cost.seconds(StepWork(1, BLOCK_SIZE * self.pool.num_blocks, 0, 0.0))
            in_time = self.scheduler.step_cost.seconds(work) <= self.scheduler.step_limit_s + one_token_s
            assert in_time or work.prefill_tokens <= MIN_PROMPT_TOKENS

    def assert_decodes_go_on(self, plan: StepPlan) -> None:
        """A sequence that samples in the step in flight is in the step ahead, unless its promised token is the last."""
        planned = {chunk.sequence.sequence_id for chunk in plan.chunks}
        for chunk in self.steps[0].chunks:
            sequence = self.sequences[chunk.sequence.sequence_id]
            if chunk.samples and sequence.finish_reason is None:
                at_most = sequence.request.max_total_tokens - len(sequence.token_ids)
                if sequence.sample_limit is not None:
                    num_sampled = len(sequence.token_ids) - sequence.request.num_prompt_tokens
                    at_most = min(at_most, sequence.sample_limit - num_sampled)
                assert (sequence.sequence_id in planned) == (at_most > 1)

    def assert_chunks_are_safe(self, plan: StepPlan) -> None:
        """Every chunk starts where the last one ends, and writes to blocks that no other sequence or peer uses."""
        oldest = plan is self.steps[0]
        holders = self.holders()
        findable = {block for sequence in self.born for block in self.find(sequence)}
        leased = {block for lease in self.leases for block in lease.blocks}
        incoming = {block for pull in self.pulls for block in pull.reserved}
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence.sequence_id]
            assert chunk.sequence.block_table is sequence.block_table
            end = chunk.start + chunk.num_tokens
            assert chunk.samples == (end >= len(sequence.token_ids))
            assert not chunk.drafts or (chunk.samples and end + len(chunk.drafts) < sequence.max_num_tokens)
            if oldest:
                assert chunk.start == sequence.num_computed_tokens
                if sequence.sequence_id not in self.failed_before:
                    self.assert_readable(sequence, chunk.start)
            else:
                assert end == sequence.num_planned_tokens
                assert chunk.promised == (chunk.start == len(sequence.token_ids))
                assert sequence.finish_reason is None, "an ended sequence is planned"
            last = chunk.start + chunk.num_rows - 1
            written = set(sequence.block_table[chunk.start // BLOCK_SIZE : last // BLOCK_SIZE + 1])
            assert all(holders[block] == 1 for block in written), "writes a block that another sequence holds"
            assert not written & (findable | leased | incoming), "writes a block that others may read"

    def assert_readable(self, sequence: Sequence, end: int) -> None:
        found = self.memory.slots(sequence.block_table, 0, end)
        assert found == contents(sequence, 0, end), f"{sequence.sequence_id} reads another prefix than its own"

    def execute(self, plan: StepPlan, failed: Set[str]) -> None:
        """Run the step as a runner does, but at its end, so that the events during the step can do harm. The chunks of
        failed sequences stay as they are."""
        self.assert_chunks_are_safe(plan)
        plan = computed_part(plan, failed)
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence.sequence_id]
            end = chunk.start + chunk.num_tokens
            self.memory.write(sequence, chunk.start, end, chunk.drafts)
        for chunk in plan.chunks:
            self.assert_readable(self.sequences[chunk.sequence.sequence_id], chunk.start + chunk.num_tokens)

    @precondition(lambda self: self.steps)
    @rule(seed=picks, offers=st.booleans(), fails=st.sampled_from([0.0, 0.0, 0.5]))
    def end_step(self, seed: int, offers: bool, fails: float) -> None:
        plan = self.steps[0]
        assert plan is self.scheduler.oldest_step
        draw = random.Random(seed)
        names = {c.sequence.sequence_id for c in plan.chunks}
        failed = {name for name in sorted(names) if draw.random() < fails} | (names & self.failed_before)
        self.failed_before = failed
        self.execute(plan, failed)
        del self.steps[0]
        if offers:
            self.offer_finished_prompts(computed_part(plan, failed))
        sampled = {c.sequence.sequence_id: sample(c, draw) for c in computed_part(plan, failed).chunks if c.samples}
        guesses = {name: Proposal.copied(tuple(draw.choices(TOKENS, k=draw.randrange(6))), 1) for name in sampled}
        before = {c.sequence.sequence_id: list(self.sequences[c.sequence.sequence_id].token_ids) for c in plan.chunks}
        aborted = {
            c.sequence.sequence_id
            for c in plan.chunks
            if self.sequences[c.sequence.sequence_id].finish_reason is not None
        }
        errors = {name: OutOfDeviceMemory("no memory") for name in failed}
        events = self.scheduler.complete_step(StepOutput(plan.step_id, sampled, errors, proposed=guesses))
        assert all(self.sequences[name].finish_reason is FinishReason.ERROR for name in failed - aborted)
        assert {event.sequence_id for event in events} == sampled.keys() - aborted
        for name in sampled.keys() - aborted:
            own = [event for event in events if event.sequence_id == name]
            self.assert_tokens_count_once(own, before[name], sampled[name])
        ended = {event.sequence_id for event in events if event.finish_reason is not None} | aborted | failed
        self.forget_those_that_left([self.sequences[name] for name in ended])

    @precondition(lambda self: not self.steps)
    @rule(num_steps=st.integers(2, 6), seed=picks, ahead=st.booleans())
    def run_steps(self, num_steps: int, seed: int, ahead: bool) -> None:
        for step in range(num_steps):
            self.begin_step()
            if ahead and len(self.steps) == 1:
                self.begin_step()
            if self.steps:
                self.end_step(seed + step, offers=False, fails=0.0)
            self.the_ledger_balances()

    def offer_finished_prompts(self, plan: StepPlan) -> None:
        """Lease the blocks of finished prompts with the last, partial block, as a prefill worker does."""
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence.sequence_id]
            if chunk.samples and sequence.sample_limit == 1 and sequence.finish_reason is None:
                self.lease(sequence, chunk.start + chunk.num_tokens)

    def assert_tokens_count_once(
        self, events: list[TokenEvent], before: list[int], sampled: tuple[SampledToken, ...]
    ) -> None:
        """The tokens up to the first that ends the sequence."""
        sequence = self.sequences[events[0].sequence_id]
        assert [event.token for event in events] == list(sampled[: len(events)])
        assert sequence.token_ids == [*before, *(event.token.token_id for event in events)]
        first = len(before) - sequence.request.num_prompt_tokens
        assert [event.index for event in events] == list(range(first, first + len(events)))
        assert all(event.finish_reason is None for event in events[:-1])
        assert events[-1].finish_reason is sequence.finish_reason
        assert sequence.finish_reason is not None or len(events) == len(sampled)

    def forget_those_that_left(self, ended: list[Sequence]) -> None:
        """An ended sequence leaves once no step in flight contains it, and then holds no block."""
        in_flight = {chunk.sequence.sequence_id for plan in self.steps for chunk in plan.chunks}
        for sequence in ended:
            assert (self.scheduler.get(sequence.sequence_id) is not None) == (sequence.sequence_id in in_flight)
            if sequence.sequence_id not in in_flight:
                assert not self.sequences.pop(sequence.sequence_id).block_table

    @precondition(lambda self: self.steps)
    @rule()
    def fail_step(self) -> None:
        in_failed = {chunk.sequence.sequence_id for chunk in self.steps[0].chunks}
        ids = {chunk.sequence.sequence_id for plan in self.steps for chunk in plan.chunks}
        ended = {name for name in ids if self.sequences[name].finish_reason is not None}
        self.steps.clear()
        self.failed_before = set()
        failed = self.scheduler.fail_step()
        assert {sequence.sequence_id for sequence in failed} == in_failed - ended
        assert all(sequence.finish_reason is FinishReason.ERROR for sequence in failed)
        assert all(s.num_planned_tokens == s.num_computed_tokens for s in self.sequences.values())
        self.forget_those_that_left([self.sequences[name] for name in in_failed | ended])

    # ---- invariants

    @invariant()
    def the_ledger_balances(self) -> None:
        self.pool.check()
        self.scheduler.check()
        assert self.scheduler.queues.by_id == self.sequences
        held = self.holders().keys()
        leased = {block for lease in self.leases for block in lease.blocks}
        incoming = [block for pull in self.pulls for block in pull.reserved]
        assert len(set(incoming)) == len(incoming)
        assert not set(incoming) & (held | leased)
        ledger = self.pool.ledger()
        assert sum(ledger.values()) == self.pool.num_blocks
        assert ledger[Column.HELD] == len(held), "a hold was leaked or lost"
        assert ledger[Column.LEASED] == len(leased - held)
        assert ledger[Column.INCOMING] == len(incoming)

    @invariant()
    def the_cache_has_no_wrong_block(self) -> None:
        for sequence in self.sequences.values():
            if not sequence.block_table:
                found = self.find(sequence)
                end = len(found) * BLOCK_SIZE
                assert self.memory.slots(found, 0, end) == contents(sequence, 0, end)

    def teardown(self) -> None:
        self.patches.stop()
        if not hasattr(self, "scheduler") or sys.exc_info()[0] is not None:
            return  # `start` did not run, or a rule has failed
        self.run_to_the_end()

    def run_to_the_end(self) -> None:
        """Once every pull and lease has ended and no sequence arrives, every sequence finishes."""
        while self.pulls:
            self.end_pull(0, arrives=False, token_id=1)
        while self.leases:
            self.unlease(0)
        tokens_left = sum(s.request.max_total_tokens for s in self.sequences.values())
        for number in range(2 + tokens_left * (1 + len(self.sequences))):
            while len(self.steps) < 1 + number % 2:
                num_steps = len(self.steps)
                self.begin_step()
                if len(self.steps) == num_steps:
                    break
            if self.steps:
                self.end_step(seed=1, offers=False, fails=0.0)
            self.the_ledger_balances()
            if not self.sequences:
                break
        assert not self.sequences, "a sequence starves"
        ledger = self.pool.ledger()
        assert ledger[Column.HELD] == ledger[Column.LEASED] == ledger[Column.INCOMING] == 0


class SchedulerWithForgedBlocks(SchedulerMachine):
    """Many lists of tokens have equal hashes, and so have salts."""

    def __init__(self) -> None:
        super().__init__()
        self.weak_hashes = patch.multiple(
            "core.block_hash",
            local_hash=lambda token_bytes: token_bytes[0] % 2,
            chain_hash=lambda parent, local: (2 * parent + local) % 5,
        )
        self.weak_hashes.start()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.weak_hashes.stop()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=60)
TestSchedulerWithForgedBlocks = SchedulerWithForgedBlocks.TestCase
TestSchedulerWithForgedBlocks.settings = settings(max_examples=50, stateful_step_count=60)
