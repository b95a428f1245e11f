"""A scheduler with a small pool. Tests run its steps and choose the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from core.config import SchedulerConfig
from core.errors import OutOfDeviceMemory
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from core.step import SampledToken, StepOutput, StepPlan, TokenEvent
from tests.support.cached_blocks import reserved

BLOCK_SIZE = 4
EOS = 0


def make_sequence(
    name: str,
    prompt: Tokens[int],
    *,
    arrival: int = 0,
    priority: int = 0,
    sample_limit: int | None = None,
    salt: str = "",
    tenant: str = "",
    **sampling: object,
) -> Sequence:
    """`arrival` breaks ties of priority. `sampling`: options of SamplingParams; max_tokens is 8 by default."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
    request = Request(name, tuple(prompt), len(prompt), params, priority=priority, cache_salt=salt, tenant=tenant)
    return Sequence(request, arrival, sample_limit)


class Driven:
    """Every sampled token is `next_token`."""

    def __init__(
        self,
        num_blocks: int = 32,
        budget: int = 64,
        max_running: int = 8,
        max_waiting: int = 16,
        slo_itl_ms: float = 1000.0,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        config = SchedulerConfig(budget, max_running, max_waiting, slo_itl_ms)
        self.scheduler = Scheduler(config, self.pool, block_size, frozenset({EOS}))
        self.next_token = 9

    def add(self, name: str, prompt: Tokens[int], **options: object) -> Sequence:
        sequence = make_sequence(name, prompt, **options)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def add_pulled(self, name: str, prompt: Tokens[int], **options: object) -> Sequence:
        """Add a sequence whose prompt KV and first token come from a peer."""
        sequence = make_sequence(name, prompt, **options)  # type: ignore[arg-type]
        self.scheduler.hold_cached_prefix(sequence, len(prompt))
        targets = reserved(self.pool, -(-len(prompt) // self.block_size) - len(sequence.block_table))
        self.pool.arrive(targets)
        sequence.block_table += targets
        sequence.num_computed_tokens = len(prompt)
        sequence.token_ids.append(self.next_token)
        self.scheduler.add(sequence)
        return sequence

    def begin(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def end(self, plan: StepPlan, failed: Iterable[str] = ()) -> list[TokenEvent]:
        """`failed`: sequences whose chunks were not computed."""
        failures = {name: OutOfDeviceMemory("no memory") for name in failed}
        sampled = {
            chunk.sequence.sequence_id: (SampledToken(self.next_token),)
            for chunk in plan.chunks
            if chunk.samples and chunk.sequence.sequence_id not in failures
        }
        events = self.scheduler.complete_step(StepOutput(plan.step_id, sampled, failures))
        self.scheduler.check()
        self.pool.check()
        return events

    def step(self) -> dict[str, int]:
        """Run one step. Returns the number of computed tokens by sequence, in the order of the plan."""
        plan = self.begin()
        self.end(plan)
        return {chunk.sequence.sequence_id: chunk.num_tokens for chunk in plan.chunks}

    def run_until_idle(self, max_steps: int = 200) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for _ in range(max_steps):
            plan = self.scheduler.schedule()
            if plan is None:
                return events
            events += self.end(plan)
        raise AssertionError(f"not idle after {max_steps} steps")
