"""Prompts of a small pool all end, although readers keep the blocks of each prompt until it has ended, and longer.

This is the life of a prefill worker. A prompt that passes a half-computed one must leave it the blocks to go on.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from core.scheduling.block_pool import Column
from core.scheduling.sequence import Sequence
from core.step import StepPlan
from tests.unit.core.driving_scheduler import BLOCK_SIZE, Driven

MAX_STEPS = 2000

prompts = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2), st.sampled_from(["", "a", "b"]), st.integers(0, 3)),
    min_size=1,
    max_size=16,
)


@settings(max_examples=200)
@given(prompts, st.integers(10, 24), st.integers(1, 4), st.integers(0, 12), st.integers(0, 6), st.booleans())
def test_every_prompt_ends_though_readers_keep_its_blocks(
    wanted: list[tuple[int, int, str, int]], num_blocks: int, max_running: int, spare: int, read_steps: int, ahead: bool
) -> None:
    """`wanted`: (tokens, priority, tenant, steps after the arrival before)."""
    driven = Driven(num_blocks, budget=max_running + spare, max_running=max_running, max_waiting=64)
    pool, scheduler = driven.pool, driven.scheduler
    arrive_at = accumulate(gap for *_, gap in wanted)
    arriving = deque(zip(arrive_at, wanted, strict=True))
    sequences: list[Sequence] = []
    leased: dict[str, list[int]] = {}
    reads_end: deque[tuple[int, list[int]]] = deque()  # (step, blocks)
    plans: deque[StepPlan] = deque()
    for step in range(MAX_STEPS):
        while arriving and step >= arriving[0][0]:
            _, (num_tokens, priority, tenant, _) = arriving.popleft()
            number = len(sequences)
            tokens = range(100 * number + 1, 100 * number + 1 + num_tokens)
            options = {"arrival": number, "priority": priority, "tenant": tenant, "sample_limit": 1}
            sequences.append(driven.add(f"p{number}", tokens, **options))
        while reads_end and reads_end[0][0] <= step:
            pool.unlease(reads_end.popleft()[1])
        while len(plans) < 1 + ahead and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        if plans:
            plan = plans.popleft()
            for chunk in plan.chunks:  # offer its full blocks
                known = leased.setdefault(chunk.sequence.sequence_id, [])
                new = chunk.sequence.block_table[len(known) : (chunk.start + chunk.num_tokens) // BLOCK_SIZE]
                pool.lease(new)
                known += new
            ended = [event.sequence_id for event in driven.end(plan)]
            reads_end.extend((step + read_steps, leased.pop(name, [])) for name in ended)
        if not arriving and not scheduler.queues.by_id:
            break
    assert not arriving
    assert all(sequence.finish_reason is not None for sequence in sequences), "a prompt starves"
    assert scheduler.num_preemptions == 0
    assert pool.ledger()[Column.HELD] == 0
