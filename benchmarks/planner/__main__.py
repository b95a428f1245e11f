"""The planner beside fixed sizes, thresholds and an oracle, in virtual time: `make bench-planner`.

Routers, workers, the fleet and the planner are the production machines (`benchmarks/planner/elastic.py`), the times of
steps those of a model three times as large as Llama-3.1-8B on an H100. The requests are those of Mooncake's
conversation trace, by a Poisson process whose rate follows a curve. Worker-hours count from the decision to start a
worker until it has left.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.cases import CURVES, FIRST_SIZES, MAX_WORKERS, replay_config
from benchmarks.planner.elastic import ElasticReplay
from benchmarks.planner.elastic_fleet import Sizing
from benchmarks.planner.large_fleet import event_seconds, plan_seconds
from benchmarks.planner.rivals import MARGIN, Fixed, Oracle, Thresholds, by_saturation, cheapest, one_by_one
from benchmarks.report import Line, Report
from core.config import PlannerConfig
from core.cost.step_cost import StepCost
from fleet.planner.outlook import Outlook
from fleet.planner.planner import Planner
from fleet.planner.prediction import Demand, FleetModel, WorkerModel
from simulator.processes import CountEnded, run_all
from simulator.replay.replay import START_S

TRACES = Path("../shared/traces")
STARTS_S = (5.0, 60.0, 120.0, 300.0)
OURS, FIXED, ORACLE = "planner", "fixed", "oracle"
SIZINGS = (OURS, "thresholds", "one by one", FIXED, ORACLE)
LARGE_FLEET = 1000
LARGE_RATE, LARGE_DURATION_S = 4500.0, 300  # requests/s at the highest


@dataclass(frozen=True, slots=True)
class SizedResult:
    attainment: float
    worker_hours: float
    reversals_per_hour: float
    num_failed: int


@dataclass(frozen=True, slots=True)
class SizedRun:
    curve: str
    sizing: str
    start_s: float
    traces: Path
    seed: int

    def run(self, on_progress: CountEnded) -> SizedResult:
        curve = CURVES[self.curve]
        sizes = curve.fixed if self.sizing == FIXED else FIRST_SIZES
        if self.sizing == ORACLE:
            sizes = cheapest(MARGIN * max(curve.rate_at(0.0), 0.2))
        made: dict[str, Callable[[], Sizing]] = {
            OURS: lambda: Planner(
                PlannerConfig(enabled=True, max_prefill=MAX_WORKERS, max_decode=MAX_WORKERS, start_s=self.start_s)
            ),
            "thresholds": lambda: Thresholds(by_saturation),
            "one by one": lambda: Thresholds(one_by_one),
            FIXED: Fixed,
            ORACLE: lambda: Oracle(curve.rate_at, self.start_s, START_S),
        }
        sizing = made[self.sizing]()
        config = replay_config(*sizes, self.seed)
        workload = curve.workload(self.traces, self.seed)
        result = ElasticReplay(workload, config, sizing, self.start_s).run_elastic(on_progress)
        replay = result.replay
        return SizedResult(replay.attainment, result.worker_hours, result.reversals_per_hour, replay.num_failed)


def compare(report: Report, options: argparse.Namespace) -> None:
    runs = [
        SizedRun(curve, sizing, start_s, options.traces, options.seed)
        for curve in options.curves
        for start_s in options.starts
        for sizing in options.sizings
        # Fixed sizes start nothing, and the oracle starts everything in time.
        if sizing not in (FIXED, ORACLE) or start_s == options.starts[0]
    ]
    results = dict(zip(runs, run_all(runs, options.processes, lambda _: None), strict=True))
    for run, result in results.items():
        _add(report, run, result, {other.sizing: found for other, found in results.items() if other.curve == run.curve})


def _add(report: Report, run: SizedRun, result: SizedResult, beside: dict[str, SizedResult]) -> None:
    starts = "" if run.sizing in (FIXED, ORACLE) else f", starts of {run.start_s:g} s"
    name = f"{run.curve}: {run.sizing}{starts}"
    is_ours = run.sizing == OURS
    least = (0.9 if run.start_s >= 120.0 else 0.95) if is_ours else None
    report.add(Line(f"{name}: attainment", result.attainment, "", least=least))
    hours = result.worker_hours
    report.add(Line(f"{name}: worker-hours", hours, "h"))
    if is_ours and FIXED in beside:
        report.add(Line(f"{name}: worker-hours / fixed", hours / beside[FIXED].worker_hours, "", most=0.75))
    if is_ours and ORACLE in beside:
        report.add(Line(f"{name}: worker-hours / oracle", hours / beside[ORACLE].worker_hours, "", most=1.25))
    if run.sizing != FIXED:
        report.add(Line(f"{name}: reversals", result.reversals_per_hour, "/h", most=1.0 if is_ours else None))
    if run.sizing not in (FIXED, ORACLE):
        report.add(Line(f"{name}: failed requests", result.num_failed, "", most=0.0 if is_ours else None))


def plan_time(report: Report) -> None:
    """Of the search for the cheapest sizes among LARGE_FLEET of each role, and of an event of so large a fleet."""
    worker = WorkerModel(StepCost(0.006, 0.0, 5e-8, 2e-5, 5e-10), 0.05, 8192, 400_000)
    demand = Demand(3000.0, 12_000.0, 8000.0, 2.0, 343.0)
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        outlook = Outlook.of(FleetModel(worker, worker), demand, 2.0, 0.05, (LARGE_FLEET, LARGE_FLEET))
        found = min(outlook.frontier(range(LARGE_FLEET + 1), range(1, LARGE_FLEET + 1)), key=sum)
        seconds.append(time.perf_counter() - began)
    where = f"plan for up to {LARGE_FLEET:,} + {LARGE_FLEET:,} workers (finds {found[0]} + {found[1]})"
    report.add(Line(where, sorted(seconds)[4] * 1e3, "ms", most=50.0))
    planned_s, largest = plan_seconds(LARGE_FLEET, LARGE_RATE, LARGE_DURATION_S)
    of_fleet = f"of a fleet of {LARGE_FLEET:,} + {LARGE_FLEET:,} workers"
    add_times(report, f"plan {of_fleet} at most, up to {largest} prefill", planned_s, 50.0)
    add_times(report, f"event {of_fleet}", event_seconds(LARGE_FLEET), 1.0)


def add_times(report: Report, words: str, seconds: list[float], most_ms: float) -> None:
    ordered = sorted(seconds)
    for name, share, most in (("p50", 0.50, None), ("p99", 0.99, most_ms)):
        report.add(Line(f"{words}, {name}", ordered[int(share * len(ordered))] * 1e3, "ms", most=most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="the directory of the traces")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--starts", nargs="+", type=float, default=STARTS_S, help="seconds of a start")
    parser.add_argument("--sizings", nargs="+", choices=SIZINGS, default=SIZINGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"no traces in {options.traces}: benchmarks/traces.py names them")
    report = Report("planner")
    plan_time(report)
    compare(report, options)
    report.write()


if __name__ == "__main__":
    main()
