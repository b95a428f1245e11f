"""Plans ahead at random change no token and leave no block behind, also when blocks are short, and when whole steps or
single sequences of a step fail.

A step is computed from the slots of a memory, as a runner does, and takes promised tokens from the step before. The
scheduler may be told of a result later than the next step begins.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import SchedulerConfig
from core.errors import OutOfDeviceMemory
from core.lifecycle import FinishReason
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from core.step import StepOutput, StepPlan
from simulator.memory import EOS_TOKEN_IDS, Memory, expected_output

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_STEPS = 3000

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=18)
tenants = st.sampled_from(["", "a", "b"])
requests = st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 2), tenants), min_size=1, max_size=7)


@settings(max_examples=150)
@given(
    requests,
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from([100.0, 1.0]),
)
def test_with_random_plans_ahead_the_tokens_equal_those_of_one_step_at_a_time(
    wanted: list[tuple[list[int], int, int, str]],
    draw: object,
    max_running: int,
    spare_budget: int,
    with_failures: bool,
    slo_itl_ms: float,
) -> None:
    chance = draw.random  # type: ignore[attr-defined]
    pool = BlockPool(NUM_BLOCKS)
    config = SchedulerConfig(max_running + spare_budget, max_running, 64, slo_itl_ms)
    scheduler = Scheduler(config, pool, BLOCK_SIZE, EOS_TOKEN_IDS)
    memory = Memory(NUM_BLOCKS, BLOCK_SIZE, garbage=1)
    arriving = deque(_sequence(index, *request) for index, request in enumerate(wanted))
    sequences = list(arriving)
    computed: deque[StepOutput] = deque()  # the scheduler does not know of these yet
    planned: deque[StepPlan] = deque()
    for _ in range(MAX_STEPS):
        if arriving and chance() < 0.4:
            scheduler.add(arriving.popleft())
        if scheduler.num_steps_in_flight < 2 and (not scheduler.num_steps_in_flight or chance() < 0.6):
            plan = scheduler.schedule()
            planned.extend([plan] if plan is not None else [])
        if planned and chance() < 0.7:
            plan = planned.popleft()
            failing = [chunk.sequence.sequence_id for chunk in plan.chunks if with_failures and chance() < 0.05]
            computed.append(memory.run(plan, {name: OutOfDeviceMemory("no memory") for name in failing}))
        if planned and not computed and with_failures and chance() < 0.1:
            planned.clear()
            scheduler.fail_step()
        elif computed and chance() < 0.7:
            scheduler.complete_step(computed.popleft())
        scheduler.check()
        pool.check()
        if not arriving and not scheduler.queues.by_id:
            break
    assert all(sequence.finish_reason is not None for sequence in sequences), "a sequence starves"
    for sequence in sequences:
        output, reason = expected_output(sequence.request)
        got = sequence.token_ids[sequence.request.num_prompt_tokens :]
        if sequence.finish_reason is FinishReason.ERROR:
            assert with_failures
            assert got == output[: len(got)]
        else:
            assert (got, sequence.finish_reason) == (output, reason)
    assert pool.ledger()[Column.HELD] == 0


def _sequence(index: int, prompt: list[int], max_tokens: int, priority: int, tenant: str) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=index)
    request = Request(f"s{index}", tuple(prompt), len(prompt), sampling, priority=priority, tenant=tenant)
    return Sequence(request, index)
