"""Routing policies side by side, in one simulator: `make bench-policies`.

Routers and workers are the production machines, in virtual time with the cost model of an H100 (`simulator/`), so the
load of this machine changes nothing. Each case is replayed with the policy of Tandem and with those of `rivals.py`.
Dynamo's own replay of the same trace is printed beside ours where `make bench-peers` has installed it.

The traces are conversation_trace.jsonl of kvcache-ai/Mooncake (Apache-2.0), AzureLLMInferenceTrace_conv.csv of
Azure/AzurePublicDataset (CC-BY-4.0), and sessions of LMCache/lmcache-agent-trace (Apache-2.0).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.policies import dynamo_replay
from benchmarks.policies.cases import CASES, CONVERSATION, SLO_TPOT_S, Case, conversation, dynamo_run
from benchmarks.policies.figures import WITHIN, Results, case_table, goal_lines
from benchmarks.policies.rivals import OURS, POLICIES
from benchmarks.replays import by_seed, run_replays, say_missed
from benchmarks.report import OUTPUT_DIR, Line, Report
from simulator.replay_result import ReplayResult

TRACES = Path("../shared/traces")
QUICK_REQUESTS = 300
DYNAMO_FLEETS = ((8, 1_000_000), (8, 3_000_000), (16, 3_000_000))


def compare(report: Report, options: argparse.Namespace) -> list[Line]:
    """Print every case as soon as it is known. Returns the lines with a goal."""
    goals: list[Line] = []
    tables = []
    policies = [POLICIES[name] for name in options.policies]
    for case in (CASES[key] for key in options.cases):
        seeds = range(options.seeds)
        runs = [case.run(policy, seed, options.traces, options.requests) for policy in policies for seed in seeds]
        results = by_seed(run_replays(report, runs, options.processes), options.seeds)
        found: Results = dict(zip(policies, results, strict=True))
        tables.append(f"{headline(case, found[policies[0]][0])}\n\n{case_table(found)}")
        report.say("\n" + tables[-1])
        for line in goal_lines(case, found) if OURS in policies and len(policies) > 1 else ():
            report.add(line)
            goals.append(line)
        OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
        (OUTPUT_DIR / "policies_tables.md").write_text("\n".join(tables), encoding="utf-8")
    return goals


def headline(case: Case, result: ReplayResult) -> str:
    return (
        f"**{case.title}**: {result.num_requests:,} requests, {result.rate:.1f} a second; limits: TTFT "
        f"{case.slo_ttft_s:g} s, TPOT {SLO_TPOT_S * 1e3:g} ms; a cache without a limit hits "
        f"{result.infinite_hit_ratio:.3f}"
    )


def beside_dynamo(report: Report, options: argparse.Namespace) -> list[Line]:
    """Our hit ratio beside that of Dynamo's own replay, which takes the whole trace at its own times."""
    if not dynamo_replay.is_installed():
        report.say("\nDynamo is not installed: `make bench-peers` installs it")
        return []
    workload = partial(conversation, options.traces, options.requests)
    fleets = [(*fleet, is_split) for fleet in DYNAMO_FLEETS for is_split in (False, True)]
    results = run_replays(report, [dynamo_run(*fleet, workload) for fleet in fleets], options.processes)
    report.say("\nDynamo's own replay of the conversation trace, at the times of the trace; TTFT by its model of a GPU")
    lines: list[Line] = []
    for (num_workers, pool_tokens, is_split), ours in zip(fleets, results, strict=True):
        theirs = dynamo_replay.replay(options.traces / CONVERSATION, options.requests, num_workers, pool_tokens)
        report.say(f"Dynamo, {num_workers} workers: TTFT p50 {theirs.ttft_p50_ms:.0f}, p90 {theirs.ttft_p90_ms:.0f} ms")
        shape = f"{num_workers} + {num_workers}" if is_split else f"{num_workers} undivided"
        measure = f"{shape} workers of {pool_tokens // 1_000_000} M tokens: hit ratio"
        lines.append(Line(measure, ours.hit_ratio, "", "Dynamo", theirs.hit_ratio, least_ratio=1.0))
        report.add(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="the directory of the traces")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--requests", type=int, help="of each trace, from its start; default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--no-dynamo", action="store_true", help="without Dynamo's own replay")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests of each trace")
    options = parser.parse_args()
    if options.quick:
        options.requests = min(options.requests or QUICK_REQUESTS, QUICK_REQUESTS)
    if not options.traces.is_dir():
        sys.exit(f"no traces in {options.traces}: {(__doc__ or '').strip().splitlines()[-2]}")
    report = Report("policies")
    goals = compare(report, options)
    if not options.no_dynamo:
        goals += beside_dynamo(report, options)
    say_missed(report, goals, f"Within {WITHIN:.0%} of the best rival, or better")
    report.write()


if __name__ == "__main__":
    main()
