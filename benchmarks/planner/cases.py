"""The traffic, the workers and the goals of `make bench-planner`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.traces import conversation
from core.config import RouterConfig, SchedulerConfig
from core.cost.step_cost import StepCost
from simulator.replay import workloads
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.workloads import Workload
from simulator.shells.cost_model import H100_8B

SLOWNESS = 3.0  # a model three times as large as the one of H100_8B
COST = StepCost(*(SLOWNESS * term for term in astuple(H100_8B)))
SLO_TTFT_S, SLO_TPOT_S = 6.0, 0.1  # twice what the longest twentieth of the prompts takes on an idle worker
MAX_WORKERS = 16  # of each role
FIRST_SIZES = 1, 1


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    rate_at: Callable[[float], float]  # requests/s, by seconds
    highest: float
    duration_s: float
    fixed: tuple[int, int]  # prefill and decode workers: the fewest of those tried that reach an attainment of 0.95

    def workload(self, traces: Path, seed: int) -> Workload:
        return workloads.by_curve(conversation(traces, None), self.rate_at, self.highest, self.duration_s, seed)


def day(of_s: float) -> Callable[[float], float]:
    return lambda seconds: 1.1 - 0.9 * math.cos(2.0 * math.pi * seconds / of_s)


def _step(seconds: float) -> float:
    return 3.0 if 800.0 < seconds < 1600.0 else 1.0


def _on_and_off(seconds: float) -> float:
    return 1.5 if seconds % 1200.0 < 600.0 else 0.0


CURVES = {
    curve.name: curve
    for curve in (
        Curve("day of 0.2 to 2 in one hour", day(3600.0), 2.0, 3600.0, (3, 3)),
        Curve("step of 3", _step, 3.0, 2400.0, (5, 4)),
        Curve("on and off", _on_and_off, 1.5, 2400.0, (3, 3)),
    )
}


def replay_config(num_prefill: int, num_decode: int, seed: int) -> ReplayConfig:
    return ReplayConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_cost=COST,
        decode_cost=COST,
        slo_ttft_s=SLO_TTFT_S,
        slo_tpot_s=SLO_TPOT_S,
        seed=seed,
        router=RouterConfig(max_in_flight_per_worker=1024, slo_ttft_ms=SLO_TTFT_S * 1e3),
        scheduler=SchedulerConfig(
            max_batched_tokens=8192, max_running=256, max_waiting=4096, slo_itl_ms=SLO_TPOT_S * 1e3
        ),
    )
