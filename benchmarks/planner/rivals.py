"""Other ways to size the pools, as `Sizing`: fixed, by thresholds, or knowing the future.

fixed        the fewest workers that hold the highest rate in the simulation, all the time
thresholds   of llm-d's Workload Variant Autoscaler (deploy/configmap-saturation-scaling.yaml, v0.9): a worker is full
             at 0.80 of its KV or 5 waiting requests; one more when the mean worker is within 0.1 or 3 of that, one
             less when the others would stay clear of it. Every 30 s
one by one   as Dynamo's load planner: one more above 0.80 of the KV of decode workers, or 5 waiting requests for
             each prefill worker, one less below half of that; no decision while a worker starts. Every 30 s
oracle       the cheapest sizes for MARGIN x the rate that will come, started in time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.planner.cases import COST, MAX_WORKERS, SLO_TPOT_S, SLO_TTFT_S
from core.fleet_control import FleetStatus, SlotState
from core.lifecycle import ServiceRole
from core.scheduling.step_budget import LIMIT_SHARE
from core.traffic import RouterTraffic, WorkerTraffic
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner.outlook import Outlook, Sizes
from fleet.planner.prediction import Demand, FleetModel, WorkerModel

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
INTERVAL_S = 30.0
FULL_KV, FULL_QUEUE = 0.8, 5.0
SPARE_KV, SPARE_QUEUE = 0.1, 3.0
SLOT_S = 30.0  # of the oracle's schedule
MARGIN = 1.4  # so that the sizes at the highest rates are those that hold them in the simulation
# Of the conversation trace, with the caches of a small fleet.
LENGTHS = Demand(rate=1.0, prompt_tokens=12_035.0, uncached_tokens=10_500.0, variation=2.0, output_tokens=343.0)

Actions = list[ScaleTo | SwitchRole | FleetMessage]


def cheapest(rate: float) -> Sizes:
    """That hold the wanted times, by the model of the planner."""
    worker = WorkerModel(COST, LIMIT_SHARE * SLO_TPOT_S, 8192, 400_000)
    demand = replace(LENGTHS, rate=rate)
    largest = MAX_WORKERS, MAX_WORKERS
    outlook = Outlook.of(FleetModel(worker, worker), demand, SLO_TTFT_S, LIMIT_SHARE * SLO_TPOT_S, largest)
    return min(outlook.frontier(range(MAX_WORKERS + 1), range(1, MAX_WORKERS + 1)), key=sum)


class Fixed:
    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        pass

    def plan(self, status: FleetStatus, now: float) -> Actions:
        del status, now
        return []


@dataclass(slots=True)
class Oracle:
    rate_at: Callable[[float], float]
    start_s: float
    begins_at: float  # time of the first request
    _sizes: dict[int, Sizes] = field(default_factory=dict)

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        pass

    def plan(self, status: FleetStatus, now: float) -> Actions:
        first = int((now - self.begins_at) / SLOT_S)
        last = int((now - self.begins_at + self.start_s) / SLOT_S) + 1
        slots = [self._at(slot) for slot in range(first, last + 1)]
        wanted = {P: max(sizes[0] for sizes in slots), D: max(sizes[1] for sizes in slots)}
        changed = {role: size for role, size in wanted.items() if status.wanted[role] != size}
        return [ScaleTo(changed)] if changed else []

    def _at(self, slot: int) -> Sizes:
        if slot not in self._sizes:
            rates = [self.rate_at(max(0.0, slot * SLOT_S + part * SLOT_S / 4)) for part in range(5)]
            self._sizes[slot] = cheapest(MARGIN * max(rates)) if max(rates) else (0, 1)
        return self._sizes[slot]


# Takes the role, its workers, and whether one of them starts or leaves. Returns one worker more, or less, or 0.
Step = Callable[[ServiceRole, list[WorkerTraffic], bool], int]


@dataclass(slots=True)
class Thresholds:
    step: Step
    _workers: tuple[WorkerTraffic, ...] = ()
    _next_at: float = 0.0

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        del router_id, now
        self._workers = traffic.workers

    def plan(self, status: FleetStatus, now: float) -> Actions:
        if now < self._next_at:
            return []
        self._next_at = now + INTERVAL_S
        sizes = {}
        for role in (P, D):
            workers = [worker for worker in self._workers if worker.role is role]
            changing = any(slot.role is role and slot.state is not SlotState.SERVING for slot in status.slots)
            if workers:
                size = min(max(status.wanted[role] + self.step(role, workers, changing), 1), MAX_WORKERS)
                if size != status.wanted[role]:
                    sizes[role] = size
        return [ScaleTo(sizes)] if sizes else []


def by_saturation(role: ServiceRole, workers: list[WorkerTraffic], changing: bool) -> int:
    """As llm-d's."""
    del role, changing
    clear = [worker for worker in workers if _kv(worker) < FULL_KV and worker.num_waiting < FULL_QUEUE]
    if not clear:
        return 1
    kv, queue = fmean(map(_kv, clear)), fmean(worker.num_waiting for worker in clear)
    if FULL_KV - kv < SPARE_KV or FULL_QUEUE - queue < SPARE_QUEUE:
        return 1
    if len(clear) < 2:
        return 0
    share = len(clear) / (len(clear) - 1)
    fits = FULL_KV - kv * share >= SPARE_KV and FULL_QUEUE - queue * share >= SPARE_QUEUE
    return -1 if fits else 0


def one_by_one(role: ServiceRole, workers: list[WorkerTraffic], changing: bool) -> int:
    """As Dynamo's."""
    if changing:
        return 0
    if role is D:
        use = fmean(map(_kv, workers)) / FULL_KV
    else:
        use = fmean(worker.num_waiting for worker in workers) / FULL_QUEUE
    return 1 if use > 1.0 else -1 if use < 0.5 else 0


def _kv(worker: WorkerTraffic) -> float:
    return worker.held_tokens / worker.pool_tokens
