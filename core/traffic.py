"""The report of a router to the planner of the fleet: its counts of requests, and the loads of its workers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

from core.cost.step_cost import StepCost
from core.lifecycle import ServiceRole


class RequestTotals(NamedTuple):
    """Sums since the start of the router. A mean is a sum over its number."""

    num_arrived: float = 0  # without those that go on after the death of another router
    num_ended: int = 0  # refused, failed and finished ones, without those that their clients cancelled
    num_within: int = 0  # of these, within the wanted times
    num_finished: int = 0  # with the sums below
    prompt_tokens: int = 0
    uncached_tokens: int = 0  # of the prompts
    uncached_squared: float = 0.0
    output_tokens: int = 0
    first_token_s: float = 0.0  # from the arrival

    @classmethod
    def of_finished(
        cls, prompt_tokens: int, cached_tokens: int, output_tokens: int, first_token_s: float, is_within: bool
    ) -> RequestTotals:
        """Of the end of one request."""
        uncached = max(1, prompt_tokens - cached_tokens)
        return cls(
            num_ended=1,
            num_within=is_within,
            num_finished=1,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached,
            uncached_squared=float(uncached) ** 2,
            output_tokens=output_tokens,
            first_token_s=first_token_s,
        )

    def since(self, before: RequestTotals) -> RequestTotals:
        return RequestTotals._make(map(operator.sub, self, before))

    def plus(self, other: RequestTotals) -> RequestTotals:
        return RequestTotals._make(map(operator.add, self, other))


@dataclass(frozen=True, slots=True)
class WorkerTraffic:
    """A worker that serves, by its newest report."""

    service_id: str
    role: ServiceRole
    step_cost: StepCost | None  # None: it has measured no step
    step_limit_s: float  # of a step with sequences in decode, or else the wanted time between tokens; 0 = none
    max_step_tokens: int
    pool_tokens: int  # room of its KV pool
    held_tokens: int  # of its pool, by running sequences, which would move
    prompt_backlog_s: float = 0.0  # prompt work to do
    num_waiting: int = 0  # sequences


@dataclass(frozen=True, slots=True)
class RouterTraffic:
    totals: RequestTotals
    num_waiting: int  # requests without a worker
    num_open: int  # requests on workers
    slo_ttft_s: float
    workers: tuple[WorkerTraffic, ...]
