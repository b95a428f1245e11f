"""A fleet of coarse workers (`simulator/coarse_worker.py`), sized by the FleetMachine and the planner of production.

A request goes to the pair, or to the decode worker alone, with the soonest first token. The candidates are the worker
that has computed its conversation, and NUM_COMPARED others of each role by chance. There is no router machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint
from core.traffic import RequestTotals, RouterTraffic
from fleet.events import Member
from simulator.coarse_worker import CoarseRequest, CoarseSpec, CoarseWorker
from simulator.elastic_fleet import ElasticFleet, Sizing
from simulator.replay import MAX_EVENTS, START_S
from simulator.trace import TraceRequest
from simulator.world import World

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
NUM_COMPARED = 32  # workers of a role
TRANSFER_S = 0.03  # of the last chunk


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    tpot_s: float


class CoarseFleet:
    def __init__(
        self,
        trace: list[TraceRequest],
        spec: CoarseSpec,
        slo: Slo,
        cluster: ClusterConfig,
        sizing: Sizing,
        start_s: float,
        seed: int = 0,
    ) -> None:
        self.world = World(seed, max_events=MAX_EVENTS, is_checked=False)
        self.fleet = ElasticFleet(self.world, cluster, sizing, start_s, self, START_S)
        self.ended: list[CoarseRequest] = []
        self._trace, self._spec, self._slo = trace, spec, slo
        self._workers: dict[str, CoarseWorker] = {}
        self._serving: dict[ServiceRole, list[CoarseWorker]] = {P: [], D: []}
        self._of_conversation: dict[tuple[ServiceRole, int], CoarseWorker] = {}
        self._totals = RequestTotals()
        self._chance = random.Random(f"coarse routers of {seed}")

    def run(self) -> None:
        self.fleet.start(self._is_done)
        for number, traced in enumerate(self._trace):
            self.world.at(START_S + traced.arrives_at, partial(self._arrive, number))
        self.world.run_until(START_S + self._trace[-1].arrives_at + 3600.0, done=self._is_done)
        assert self._is_done(), f"{len(self._trace) - len(self.ended)} requests have no end"

    def _is_done(self) -> bool:
        return len(self.ended) == len(self._trace)

    # ---- the figures

    def ttft_s(self) -> list[float]:
        return [one.first_token_at - one.arrived_at for one in self.ended]

    def tpot_s(self) -> list[float]:
        return [_tpot_s(one) for one in self.ended if one.traced.num_output_tokens > 1]

    @property
    def attainment(self) -> float:
        return self._totals.num_within / self._totals.num_ended

    # ---- requests

    def _arrive(self, number: int) -> None:
        self._totals = self._totals._replace(num_arrived=self._totals.num_arrived + 1)
        traced = self._trace[number]
        request = CoarseRequest(traced, number, self.world.now, tokens_left=traced.num_output_tokens - 1)
        self._route(request)

    def _compared(self, role: ServiceRole, traced: TraceRequest) -> list[CoarseWorker]:
        serving = self._serving[role]
        found = serving if len(serving) <= NUM_COMPARED else self._chance.sample(serving, NUM_COMPARED)
        known = self._of_conversation.get((role, traced.conversation))
        return found if known is None or known.draining or known in found else [known, *found]

    def _route(self, request: CoarseRequest) -> None:
        traced = request.traced
        decodes = self._compared(D, traced)
        choices = [(*worker.prompt_s(traced), worker.num_sequences, worker) for worker in self._compared(P, traced)]
        choices += [
            (*worker.prompt_s(traced), worker.num_sequences, worker)
            for worker in decodes
            if not worker.lacking(request)
        ]
        worker = min(choices, key=lambda choice: choice[:3])[3]
        request.decode = worker if worker.role is D else self._least_loaded(decodes, request)
        request.decode.promise(request)
        self._of_conversation[worker.role, traced.conversation] = worker
        worker.add_prompt(request)

    def _least_loaded(self, workers: list[CoarseWorker], request: CoarseRequest) -> CoarseWorker:
        return min(workers, key=lambda worker: (worker.lacking(request), worker.num_sequences))

    def _prompt_done(self, worker: CoarseWorker, request: CoarseRequest) -> None:
        request.first_token_at = self.world.now + request.delay_s
        self.world.after(request.delay_s + (0.0 if worker.role is D else TRANSFER_S), partial(self._stream, request))

    def _stream(self, request: CoarseRequest) -> None:
        assert request.decode is not None
        request.decode.promise(request, -1)
        if request.decode.draining:
            request.decode = self._least_loaded(self._compared(D, request.traced), request)
        request.decode.add_stream(request)

    def _stream_done(self, request: CoarseRequest) -> None:
        request.ended_at = self.world.now
        self.ended.append(request)
        traced, first_s = request.traced, request.first_token_at - request.arrived_at
        is_within = first_s <= self._slo.ttft_s and _tpot_s(request) <= self._slo.tpot_s
        self._totals = self._totals.plus(
            RequestTotals.of_finished(
                traced.num_tokens, request.cached_tokens, traced.num_output_tokens, first_s, is_within
            )
        )

    # ---- the workers of the fleet

    def readings(self) -> Iterable[tuple[str, RouterTraffic]]:
        workers = tuple(worker.traffic() for workers in self._serving.values() for worker in workers)
        num_open = int(self._totals.num_arrived) - self._totals.num_ended
        yield "router-0", RouterTraffic(self._totals, 0, num_open, self._slo.ttft_s, workers)

    def start_service(self, service_id: str, member: Member) -> None:
        self._start_worker(service_id, member.role)

    def _start_worker(self, worker_id: str, role: ServiceRole) -> None:
        worker = CoarseWorker(worker_id, role, self.world, self._spec, self._prompt_done, self._stream_done)
        self._workers[worker_id] = worker
        self._serving[role].append(worker)

    def drain_service(self, service_id: str) -> None:
        worker = self._workers[service_id]
        worker.draining = True
        self._serving[worker.role].remove(worker)
        for request in worker.take_streams():
            request.decode = self._least_loaded(self._compared(D, request.traced), request)
            request.decode.add_stream(request)

    def is_idle(self, service_id: str) -> bool:
        worker = self._workers[service_id]
        return not (worker.prompts or worker.streams or worker.waiting)

    def switch_service(self, service_id: str) -> None:
        """A coarse worker loses its prefix cache."""
        self._start_worker(service_id, D if self._workers[service_id].role is P else P)

    def end_service(self, service_id: str, killed: bool) -> None:
        del killed  # only a drain without an end kills, and none takes DRAIN_LIMIT_S
        del self._workers[service_id]

    def publish(self, router: Member, workers: Sequence[Endpoint]) -> None:
        """There is no router. `drain_service` follows at once."""


def _tpot_s(request: CoarseRequest) -> float:
    return (request.ended_at - request.first_token_at) / max(1, request.traced.num_output_tokens - 1)
