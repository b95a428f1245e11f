"""Counts the requests of this router for the planner of the fleet, and reads what its workers report."""

from __future__ import annotations

from core.errors import RequestCancelled
from core.scheduling.block_pool import Column
from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from router.requests.events import Fail, Finish, Outcome
from router.requests.router_view import RouterView
from router.routing.worker_record import WorkerRecord


class TrafficCount:
    def __init__(self) -> None:
        self._totals = RequestTotals()

    def arrived(self, num_requests: int) -> None:
        self._totals = self._totals._replace(num_arrived=self._totals.num_arrived + num_requests)

    def ended(self, result: Finish | Fail, slo_ttft_s: float) -> None:
        if isinstance(result, Finish):
            self._totals = self._totals.plus(_finished(result.outcome, slo_ttft_s))
        elif not isinstance(result.error, RequestCancelled):
            self._totals = self._totals._replace(num_ended=self._totals.num_ended + 1)

    def reading(self, view: RouterView, slo_ttft_s: float) -> RouterTraffic:
        workers = tuple(_worker(record) for record in view.workers() if record.serves)
        return RouterTraffic(self._totals, view.num_queued, view.num_in_flight, slo_ttft_s, workers)


def _finished(outcome: Outcome, slo_ttft_s: float) -> RequestTotals:
    is_within = outcome.first_token_s <= slo_ttft_s and outcome.within_itl
    return RequestTotals.of_finished(
        outcome.num_prompt_tokens, outcome.cached_tokens, outcome.num_output_tokens, outcome.first_token_s, is_within
    )


def _worker(record: WorkerRecord) -> WorkerTraffic:
    load, layout = record.load, record.agent.layout
    return WorkerTraffic(
        service_id=record.worker_id,
        role=record.role,
        step_cost=load.step_cost if record.has_measured else None,
        step_limit_s=load.step_limit_s or load.slo_itl_s,
        max_step_tokens=load.max_step_tokens,
        pool_tokens=record.agent.num_blocks * layout.block_size,
        held_tokens=load.ledger.get(Column.HELD, 0) * layout.block_size,
        prompt_backlog_s=sum(load.prompt_backlog),
        num_waiting=load.num_waiting + load.num_pulls_waiting,
    )
