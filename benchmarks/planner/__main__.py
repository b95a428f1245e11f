"""The planner beside fixed sizes and an oracle, in virtual time: `make bench-planner`.

    day      0.2 to 2 requests/s and back in one hour
    step     from 1 to 3 requests/s and back
    on-off   1.5 requests/s for ten minutes, then none for ten

Only the sizing differs between the rows of a part: the same requests, workers and starts. Routers, workers, the fleet
and the planner are the production machines (`benchmarks/planner/elastic.py`), the times of steps those of a model three
times as large as Llama-3.1-8B on an H100. The requests are those of Mooncake's conversation trace, by a Poisson process
whose rate follows a curve. Worker-hours count from the decision to start a worker until it has left.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.planner.elastic import ElasticReplay, ElasticResult, Sizing
from benchmarks.planner.sizings import (
    COST,
    MARGIN,
    MAX_WORKERS,
    SLO_TPOT_S,
    SLO_TTFT_S,
    Fixed,
    Oracle,
    cheapest,
    fleet_config,
)
from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.traces import CONVERSATION, TRACES
from core.config import PlannerConfig
from fleet.planner.planner import Planner
from simulator.processes import CountEnded, run_all
from simulator.replay import workloads
from simulator.replay.replay import START_S

STARTS_S = (5.0, 60.0, 120.0, 300.0)
OURS, FIXED, ORACLE = "planner", "fixed", "oracle"
FIRST_SIZES = 1, 1


@dataclass(frozen=True, slots=True)
class Curve:
    rate_at: Callable[[float], float]  # requests/s, by seconds
    highest: float
    duration_s: float
    fixed: tuple[int, int]  # prefill and decode workers: the fewest of those tried that reach an attainment of 0.95


CURVES = {
    "day": Curve(lambda at: 1.1 - 0.9 * math.cos(math.tau * at / 3600.0), 2.0, 3600.0, (3, 3)),
    "step": Curve(lambda at: 3.0 if 800.0 < at < 1600.0 else 1.0, 3.0, 2400.0, (5, 4)),
    "on-off": Curve(lambda at: 1.5 if at % 1200.0 < 600.0 else 0.0, 1.5, 2400.0, (3, 3)),
}


@dataclass(frozen=True, slots=True)
class SizedRun:
    curve: str
    sizing: str
    start_s: float  # of a worker; fixed sizes start nothing, and the oracle starts everything in time
    traces: Path

    def run(self, on_progress: CountEnded) -> ElasticResult:
        curve, sizes, sizing = CURVES[self.curve], FIRST_SIZES, self._planner()
        if self.sizing == FIXED:
            sizes, sizing = curve.fixed, Fixed()
        elif self.sizing == ORACLE:
            sizes = cheapest(MARGIN * max(curve.rate_at(0.0), 0.2))
            sizing = Oracle(curve.rate_at, self.start_s, START_S)
        trace = workloads.mooncake(self.traces / CONVERSATION, None)
        workload = workloads.by_curve(trace, curve.rate_at, curve.highest, curve.duration_s, seed=0)
        return ElasticReplay(
            workload, fleet_config(*sizes, COST, SLO_TTFT_S, SLO_TPOT_S), sizing, self.start_s
        ).run_elastic(on_progress)

    def _planner(self) -> Sizing:
        return Planner(
            PlannerConfig(enabled=True, max_prefill=MAX_WORKERS, max_decode=MAX_WORKERS, start_s=self.start_s)
        )


def compare(report: Report, traces: Path, curve: str) -> None:
    runs = [SizedRun(curve, OURS, start_s, traces) for start_s in STARTS_S]
    runs += [SizedRun(curve, sizing, STARTS_S[0], traces) for sizing in (FIXED, ORACLE)]
    *ours, fixed, oracle = run_all(runs, os.cpu_count() or 1, lambda _: None)
    for name, result in ((FIXED, fixed), (ORACLE, oracle)):
        report.add(Line(f"{curve}: {name}: attainment", result.replay.attainment, ""))
        report.add(Line(f"{curve}: {name}: worker-hours", result.worker_hours, "h"))
    report.add(Line(f"{curve}: {ORACLE}: reversals", oracle.reversals_per_hour, "/h"))
    for start_s, result in zip(STARTS_S, ours, strict=True):
        name, hours = f"{curve}: {OURS}, starts of {start_s:g} s", result.worker_hours
        least = 0.9 if start_s >= 120.0 else 0.95
        report.add(Line(f"{name}: attainment", result.replay.attainment, "", least=least))
        report.add(Line(f"{name}: worker-hours", hours, "h"))
        report.add(Line(f"{name}: worker-hours / fixed", hours / fixed.worker_hours, "", most=0.75))
        report.add(Line(f"{name}: worker-hours / oracle", hours / oracle.worker_hours, "", most=1.25))
        report.add(Line(f"{name}: reversals", result.reversals_per_hour, "/h", most=1.0))
        report.add(Line(f"{name}: failed requests", result.replay.num_failed, "", most=0.0))


def main() -> None:
    parser = parser_of(__doc__, tuple(CURVES))
    parser.add_argument("--traces", type=Path, default=TRACES, help="the directory of the traces")
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"no traces in {options.traces}: benchmarks/traces.py names them")
    report = Report("planner")
    run_parts(report, {c: partial(compare, report, options.traces, c) for c in CURVES}, options.parts)


if __name__ == "__main__":
    main()
