"""The planner and the fleet at 1,000 workers, with coarse workers (`simulator/coarse_worker.py`).

First the coarse workers beside the exact ones, at up to 32: the planner sizes both on the same traffic. Then a larger
fleet, whose plans and events are measured in CPU time. A whole day, too, is simulated with them (`cases.CURVES`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planner.cases import COST, SLO_TPOT_S, SLO_TTFT_S, Curve, replay_config
from benchmarks.report import Line, Report
from core.config import ClusterConfig, PlannerConfig
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole
from core.scheduling.step_budget import LIMIT_SHARE
from core.traffic import RouterTraffic
from fleet.events import FleetAction, FleetEvent, FleetMessage, ScaleTo, SwitchRole
from fleet.planner.outlook import Sizes
from fleet.planner.planner import Planner
from simulator.coarse_fleet import CoarseFleet, Slo
from simulator.coarse_worker import CoarseSpec
from simulator.elastic import ElasticReplay
from simulator.elastic_fleet import Sizing

START_S = 30.0
SMALL, LARGE = 16, 500  # workers of each role, at most
AGREEMENT = 0.1


@dataclass(slots=True)
class TimedPlanner:
    planner: Planner
    plan_s: list[float] = field(default_factory=list)  # CPU time

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        self.planner.note(router_id, traffic, now)

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]:
        began = time.process_time()
        actions = self.planner.plan(status, now)
        self.plan_s.append(time.process_time() - began)
        return actions


def hump(low: float, high: float, duration_s: float) -> Curve:
    """From `low` to `high` requests/s and back."""

    def rate_at(seconds: float) -> float:
        return low + (high - low) * (1.0 - math.cos(2.0 * math.pi * seconds / duration_s)) / 2.0

    return Curve(f"hump of {low:g} to {high:g}", rate_at, high, duration_s, (0, 0))


def planner_of(most: int) -> Planner:
    return Planner(PlannerConfig(enabled=True, max_prefill=most, max_decode=most, start_s=START_S))


def coarse_fleet(
    curve: Curve, first: Sizes, most: int, sizing: Sizing, start_s: float, traces: Path, seed: int
) -> CoarseFleet:
    """`first` sizes of the pools, and at the `most` so many workers of each role."""
    config = replay_config(*first, seed)
    pools = {ServiceRole.PREFILL: config.prefill_pool_tokens, ServiceRole.DECODE: config.decode_pool_tokens}
    spec = CoarseSpec(COST, LIMIT_SHARE * SLO_TPOT_S, config.scheduler.max_batched_tokens, pools)
    cluster = ClusterConfig(num_prefill=first[0], num_decode=first[1], max_workers=most, start_timeout_s=1e6)
    trace = curve.workload(traces, seed).requests
    return CoarseFleet(list(trace), spec, Slo(SLO_TTFT_S, SLO_TPOT_S), cluster, sizing, start_s, seed)


def compare_coarse(report: Report, traces: Path, seed: int) -> None:
    """The same traffic and planner, with exact and with coarse workers."""
    curve, first = hump(3.0, 9.0, 600.0), (8, 8)
    exact = ElasticReplay(
        curve.workload(traces, seed), replay_config(*first, seed), planner_of(SMALL), START_S
    ).run_elastic()
    coarse = coarse_fleet(curve, first, SMALL, planner_of(SMALL), START_S, traces, seed)
    coarse.run()
    largest = max(change.num_prefill + change.num_decode for change in exact.changes)
    pairs: dict[str, tuple[float, float, str]] = {
        "attainment": (coarse.attainment, exact.replay.attainment, ""),
        "mean TTFT": (fmean(coarse.ttft_s()), fmean(exact.replay.ttft_s), "s"),
        "mean TPOT": (fmean(coarse.tpot_s()) * 1e3, fmean(exact.replay.tpot_s) * 1e3, "ms"),
        "worker-hours": (coarse.fleet.worker_s / 3600.0, exact.worker_hours, "h"),
    }
    for name, (found, wanted, unit) in pairs.items():
        words = f"coarse beside exact, seed {seed}, up to {largest} of {2 * SMALL} workers: {name}"
        report.add(Line(words, found, unit, peer="exact", peer_value=wanted))
        report.add(Line(f"{words}: difference", abs(found / wanted - 1.0), "", most=AGREEMENT))


def large_fleet(report: Report, traces: Path, seed: int) -> None:
    curve, first = hump(300.0, 540.0, 300.0), (LARGE * 3 // 5, LARGE * 3 // 5)
    timed = TimedPlanner(planner_of(LARGE))
    fleet = coarse_fleet(curve, first, LARGE, timed, START_S, traces, seed)
    event_s = timed_events(fleet)
    began = time.process_time()
    fleet.run()
    total_s = time.process_time() - began
    largest = max(change.num_prefill + change.num_decode for change in fleet.fleet.changes)
    words = f"{curve.name} requests/s, up to {largest} of {2 * LARGE} coarse workers"
    report.add(Line(f"{words}: CPU time of all", total_s, "s"))
    report.add(Line(f"{words}: requests", len(fleet.ended), ""))
    report.add(Line(f"{words}: attainment", fleet.attainment, ""))
    report.add(Line(f"{words}: worker-hours", fleet.fleet.worker_s / 3600.0, "h"))
    add_times(report, f"{words}: plan", timed.plan_s, 50.0)
    add_times(report, f"{words}: event of the fleet", event_s, 1.0)


def timed_events(fleet: CoarseFleet) -> list[float]:
    """The CPU time of each event of its machine, from now on."""
    seconds: list[float] = []
    machine: Any = fleet.fleet.shell.machine
    handle = machine.handle

    def timed(event: FleetEvent, now: float) -> list[FleetAction]:
        began = time.process_time()
        actions: list[FleetAction] = handle(event, now)
        seconds.append(time.process_time() - began)
        return actions

    machine.handle = timed
    return seconds


def add_times(report: Report, words: str, seconds: list[float], most_ms: float) -> None:
    ordered = sorted(seconds)
    for name, share, most in (("p50", 0.50, None), ("p99", 0.99, most_ms)):
        report.add(Line(f"{words}, CPU, {name}", ordered[int(share * len(ordered))] * 1e3, "ms", most=most))
