"""Several routers beside one, on a trace of conversations in virtual time: `make bench-routers`.

The machines of routers and workers are the production ones; the time of steps and transfers comes from a cost model
(`simulator/replay.py`). Each shape is replayed with 1, 2 and 4 routers and several seeds. A seed decides arrivals, the
router of each request, and network delays. The lines are medians over the seeds; the spread of one router between seeds
shows which differences mean nothing.

The trace is `FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

from benchmarks.replays import Measure, ReplayRun, by_seed, percent_ms, run_replays, say_missed
from benchmarks.report import Line, Report
from simulator import workloads
from simulator.cost_model import layout_8b
from simulator.replay_config import ReplayConfig
from simulator.replay_result import ReplayResult, imbalance

TRACE = Path("../shared/traces/mooncake/conversation_trace.jsonl")
NUM_ROUTERS = (1, 2, 4)
WITHIN = 0.05  # of one router


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num_workers: int  # of each role
    divisor: int = 1  # of prompts and pools
    block_size: int = 64
    sticky: bool = False


SHAPES = {
    "4": Shape("4 + 4 workers", 4),
    "4-sticky": Shape("4 + 4 workers, a router for each conversation", 4, sticky=True),
    "8": Shape("8 + 8 workers", 8),
    "4-short": Shape("4 + 4 workers, prompts / 32", 4, divisor=32, block_size=16),
}
MEASURES = (
    Measure("hit ratio", "", lambda result: result.hit_ratio, is_goal=True),
    Measure("share of an infinite cache's hit ratio", "", lambda result: result.hit_share),
    Measure("TTFT p50", "ms", percent_ms("ttft_s", 50), is_goal=True),
    Measure("TTFT p90", "ms", percent_ms("ttft_s", 90), is_goal=True),
    Measure("TTFT p99", "ms", percent_ms("ttft_s", 99), is_goal=True),
    Measure("TPOT p50", "ms", percent_ms("tpot_s", 50)),
    Measure("TPOT p90", "ms", percent_ms("tpot_s", 90)),
    Measure("queue of the prefill workers, p90", "ms", percent_ms("prefill_queue_s", 90)),
    Measure("queue of the routers, p99", "ms", percent_ms("router_queue_s", 99)),
    Measure("busiest prefill worker, beside the mean", "", lambda result: imbalance(result.prefill_busy)),
    Measure("busiest decode worker, beside the mean", "", lambda result: imbalance(result.decode_busy)),
)
load_trace = cache(workloads.mooncake)


def replay_of(shape: Shape, num_routers: int, seed: int, options: argparse.Namespace) -> ReplayRun:
    config = ReplayConfig(
        num_routers=num_routers,
        num_prefill=shape.num_workers,
        num_decode=shape.num_workers,
        prefill_pool_tokens=options.pool_tokens // shape.divisor,
        layout=layout_8b(shape.block_size),
        load=options.load,
        sticky=shape.sticky,
        seed=seed,
    )
    return ReplayRun(
        partial(load_trace, options.trace, options.requests, shape.divisor, options.output_divisor), config
    )


def report_shape(report: Report, shape: Shape, results: dict[int, list[ReplayResult]]) -> list[Line]:
    """Print the lines of a shape. Returns those with a goal. `results`: by number of routers, one for each seed."""
    one = results[1]
    report.say(
        f"\n{shape.name}: {one[0].num_requests} requests in {one[0].duration_s:.0f} s, an infinite cache would hit "
        f"{one[0].infinite_hit_ratio:.4f}, prefill workers busy {statistics.fmean(one[0].prefill_busy):.0%}, "
        f"{sum(r.num_failed for found in results.values() for r in found)} requests failed in all runs"
    )
    goals = []
    for measure in MEASURES:
        alone = measure.median(one)
        report.add(Line(f"{shape.name}, 1 router: {measure.name}", alone, measure.unit))
        least = round(1 - WITHIN if measure.unit == "" else 1 / (1 + WITHIN), 3) if measure.is_goal else None
        for count in NUM_ROUTERS[1:]:
            name, value = f"{shape.name}, {count} routers: {measure.name}", measure.median(results[count])
            line = Line(name, value, measure.unit, "one router", alone, least_ratio=least)
            report.add(line)
            goals += [line] * measure.is_goal
        if measure.is_goal and len(one) > 1:
            values = [measure.of(result) for result in one]
            name = f"{shape.name}, 1 router: {measure.name}, seeds apart by"
            report.add(Line(name, (max(values) - min(values)) / alone * 100, "%"))
    return goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="a trace in the format of Mooncake")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--requests", type=int, default=2000, help="of the trace, from its start")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output-divisor", type=int, default=4, help="of the lengths of outputs")
    parser.add_argument("--load", type=float, default=0.8, help="share of prefill time without a cache")
    parser.add_argument("--pool-tokens", type=int, default=3_000_000, help="of each prefill worker, with tiers")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="one shape, 300 requests, 2 seeds")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.requests, options.seeds = options.shapes[:1], min(options.requests, 300), 2
    if not options.trace.is_file():
        sys.exit(f"no trace at {options.trace}: {(__doc__ or '').splitlines()[-1]}")
    report = Report("routers")
    report.say(f"{options.requests} requests, prefill load {options.load:g} without a cache, {options.seeds} seeds")
    shapes = [SHAPES[name] for name in options.shapes]
    runs = [replay_of(*case, options) for case in product(shapes, NUM_ROUTERS, range(options.seeds))]
    found = by_seed(run_replays(report, runs, options.processes), options.seeds)
    goals = [
        line for shape in shapes for line in report_shape(report, shape, {count: next(found) for count in NUM_ROUTERS})
    ]
    say_missed(report, goals, f"Within {WITHIN:.0%} of one router")
    report.write()


if __name__ == "__main__":
    main()
