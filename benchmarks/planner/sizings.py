"""The sizes that the planner is compared with: fixed ones, and those of an oracle that knows the rates to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

from core.config import RouterConfig, SchedulerConfig
from core.cost.step_cost import StepCost
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole
from core.scheduling.step_budget import LIMIT_SHARE
from core.traffic import RouterTraffic
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner.outlook import Outlook, Sizes
from fleet.planner.prediction import Demand, FleetModel, WorkerModel
from simulator.replay.replay_config import ReplayConfig
from simulator.shells.cost_model import H100_8B

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
SLOWNESS = 3.0  # a model three times as large as the one of H100_8B
COST = StepCost(*(SLOWNESS * term for term in astuple(H100_8B)))
SLO_TTFT_S, SLO_TPOT_S = 6.0, 0.1  # twice what the longest twentieth of the prompts takes on an idle worker
MAX_WORKERS = 16  # of each role
SLOT_S = 30.0  # of the oracle's schedule
MARGIN = 1.4  # so that the sizes at the highest rates are those that hold them in the simulation
# Of the conversation trace, with the caches of a small fleet.
LENGTHS = Demand(rate=1.0, prompt_tokens=12_035.0, uncached_tokens=10_500.0, variation=2.0, output_tokens=343.0)

Actions = list[ScaleTo | SwitchRole | FleetMessage]


@cache
def cheapest(rate: float) -> Sizes:
    """That hold the wanted times, by the model of the planner."""
    worker = WorkerModel(COST, LIMIT_SHARE * SLO_TPOT_S, 8192, 400_000)
    demand = replace(LENGTHS, rate=rate)
    largest = MAX_WORKERS, MAX_WORKERS
    outlook = Outlook.of(FleetModel(worker, worker), demand, SLO_TTFT_S, LIMIT_SHARE * SLO_TPOT_S, largest)
    return min(outlook.frontier(range(MAX_WORKERS + 1), range(1, MAX_WORKERS + 1)), key=sum)


def fleet_config(
    num_prefill: int, num_decode: int, cost: StepCost, slo_ttft_s: float, slo_tpot_s: float, **options: Any
) -> ReplayConfig:
    """Large GPUs, whose steps cost `cost` in both roles."""
    return ReplayConfig(
        num_prefill=num_prefill, num_decode=num_decode, prefill_cost=cost, decode_cost=cost,
        slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s,
        router=RouterConfig(max_in_flight_per_worker=1024, slo_ttft_ms=slo_ttft_s * 1e3),
        scheduler=SchedulerConfig(8192, max_running=256, max_waiting=4096, slo_itl_ms=slo_tpot_s * 1e3),
        **options,
    )  # fmt: skip


class Fixed:
    """The fewest workers that hold the highest rate, all the time."""

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        pass

    def plan(self, status: FleetStatus, now: float) -> Actions:
        del status, now
        return []


@dataclass(frozen=True, slots=True)
class Oracle(Fixed):
    """The cheapest sizes for MARGIN x the rate that will come, started in time."""

    rate_at: Callable[[float], float]
    start_s: float
    begins_at: float  # time of the first request

    def plan(self, status: FleetStatus, now: float) -> Actions:
        first = int((now - self.begins_at) / SLOT_S)
        last = int((now - self.begins_at + self.start_s) / SLOT_S) + 1
        slots = [self._at(slot) for slot in range(first, last + 1)]
        wanted = {P: max(sizes[0] for sizes in slots), D: max(sizes[1] for sizes in slots)}
        changed = {role: size for role, size in wanted.items() if status.wanted[role] != size}
        return [ScaleTo(changed)] if changed else []

    def _at(self, slot: int) -> Sizes:
        highest = max(self.rate_at(max(0.0, slot * SLOT_S + part * SLOT_S / 4)) for part in range(5))
        return cheapest(MARGIN * highest) if highest else (0, 1)
