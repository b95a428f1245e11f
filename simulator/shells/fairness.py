"""Checks of one machine after each of its events: hand-offs ask once there is room, and tenants get equal work."""

from __future__ import annotations

from itertools import combinations

from core.scheduling.block_pool import BlockPool
from core.scheduling.prompt_order import QUANTUM_S
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Rank, Sequence
from core.step import StepPlan
from decode_worker.machine import DecodeMachine
from simulator.virtual.world import SimulationError


class HandOffsAsk:
    """A hand-off asks its owner at once if the pool covers it beside all that ranks before it.

    If the planning of a step makes room for the hand-off, it asks when that step ends.
    """

    def __init__(self, machine: DecodeMachine) -> None:
        self._scheduler, self._pool, self._pulls = machine.core.scheduler, machine.core.pool, machine.pulls
        self._fits_since: dict[Rank, StepPlan | None] = {}  # the oldest step then, by the rank of a hand-off

    def check(self) -> int:
        """Returns how many hand-offs have not asked."""
        waiting = [pull for pull in self._pulls.by_id.values() if pull.lacks_blocks and not pull.admitted]
        if not waiting:
            self._fits_since.clear()
            return 0
        scheduler, free, claims = self._scheduler, self._num_free(), self._claims()
        fits_since, self._fits_since = self._fits_since, {}
        for pull in waiting:
            rank = pull.sequence.rank
            needed = pull.num_missing + sum(max(missing, 0) for other, missing in claims if other < rank)
            if needed > free:
                continue
            step = self._fits_since[rank] = fits_since.get(rank, scheduler.oldest_step)
            if step is None or step is not scheduler.oldest_step:
                raise SimulationError(f"hand-off {rank} has not asked: it needs {needed} blocks of {free}")
        return len(waiting)

    def _num_free(self) -> int:
        """Without one block for the next tokens of each sequence that runs or was pulled."""
        scheduler = self._scheduler
        return self._pool.num_available - len(scheduler.running) - len(scheduler.queues.waiting_with_blocks)

    def _claims(self) -> list[tuple[Rank, int]]:
        """The blocks that sequences and hand-offs have yet to take."""
        scheduler = self._scheduler
        sequences = [*scheduler.waiting, *scheduler.queues.prefilling.values()]
        claims = [(s.rank, -(-s.num_tokens // scheduler.block_size) - len(s.block_table)) for s in sequences]
        lacking = [pull for pull in self._pulls.by_id.values() if pull.lacks_blocks]
        return claims + [(pull.sequence.rank, pull.num_missing + 1) for pull in lacking]


_Share = tuple[int, str]  # priority, tenant


class TenantShares:
    """While two tenants have prompts of one priority that can all be computed, their work differs by a few chunks.

    The law is that of core/scheduling/prompt_order.py. Nothing is compared while blocks or places are scarce: then some
    prompts alone can be computed.
    """

    def __init__(self, scheduler: Scheduler, pool: BlockPool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._leads: dict[tuple[_Share, _Share], float] = {}  # seconds, since both have prompts
        self._longest_chunk_s = 0.0
        self._num_steps_seen = 0
        self._share_of: dict[str, _Share] = {}  # of the prompts before the newest event

    def check(self) -> int:
        """Returns how many pairs of tenants are compared."""
        self._record_steps()
        prompts = self._prompts()
        self._share_of = {s.sequence_id: (s.request.priority, s.request.tenant) for s in prompts}
        shares = sorted(set(self._share_of.values()))
        pairs = [(a, b) for a, b in combinations(shares, 2) if a[0] == b[0]] if self._all_can_run(prompts) else []
        self._leads = {pair: self._leads.get(pair, 0.0) for pair in pairs}
        for pair, lead in self._leads.items():
            if abs(lead) > 2.0 * (QUANTUM_S + self._longest_chunk_s):
                raise SimulationError(f"a tenant lacks its share: {pair} differ by {abs(lead):.3f} s of work")
        return len(pairs)

    def _record_steps(self) -> None:
        scheduler = self._scheduler
        for step in scheduler.steps_in_flight:
            if step.step_id < self._num_steps_seen:
                continue
            self._num_steps_seen = step.step_id + 1
            for chunk in step.chunks:
                share = self._share_of.get(chunk.sequence.sequence_id)
                if share is None:
                    continue
                work = scheduler.step_cost.prompt_seconds(chunk.num_tokens, chunk.start)
                self._longest_chunk_s = max(self._longest_chunk_s, work)
                for pair in self._leads:
                    if share in pair:
                        self._leads[pair] += work if share == pair[0] else -work

    def _prompts(self) -> list[Sequence]:
        queues = self._scheduler.queues
        return [*queues.prefilling.values(), *(s for s in queues.waiting if s in queues.prompts)]

    def _all_can_run(self, prompts: list[Sequence]) -> bool:
        scheduler = self._scheduler
        lacking = sum(-(-s.num_tokens // scheduler.block_size) - len(s.block_table) for s in prompts)
        num_sequences = len(scheduler.running) + len(scheduler.waiting)
        return num_sequences <= scheduler.config.max_running and lacking + num_sequences <= self._pool.num_available
