"""The parts of the token path that are timed alone: scheduling, routing decisions, reports and tokenizing."""

from __future__ import annotations

import statistics

from benchmarks import decisions, tokenizing
from benchmarks.report import Line, Report
from benchmarks.scheduler import scheduler_cost_s

SCHEDULER_MS = {256: 0.4, 1024: 1.6}  # sequences -> the most for a step
BUSY_PERCENT = {False: 5.0, True: 30.0}  # of a core, for the reports of idle and of busy workers


def measure(report: Report, repeats: int) -> None:
    for num_sequences, most in SCHEDULER_MS.items():
        cost_ms = 1e3 * statistics.median(scheduler_cost_s(num_sequences) for _ in range(repeats))
        report.add(Line(f"schedule and complete a step of {num_sequences:,} sequences", cost_ms, "ms", most=most))
    fleet = f"{decisions.NUM_WORKERS} + {decisions.NUM_WORKERS} workers"
    costs = [decisions.decision_cost() for _ in range(repeats)]
    prompt = f"a prompt of {decisions.PROMPT_TOKENS:,} tokens, {fleet}"
    p50, p99 = (1e3 * statistics.median(getattr(cost, name) for cost in costs) for name in ("p50_s", "p99_s"))
    report.add(Line(f"a decision for {prompt}, p50", p50, "ms", most=0.5))
    report.add(Line(f"a decision for {prompt}, p99", p99, "ms", most=1.0))
    for kind in costs[0].p50_by_kind_s:
        kind_ms = 1e3 * statistics.median(cost.p50_by_kind_s[kind] for cost in costs)
        report.add(Line(f"a decision for {prompt}, {kind}, p50", kind_ms, "ms"))
    for is_busy, most in BUSY_PERCENT.items():
        found = [decisions.report_cost(is_busy) for _ in range(repeats)]
        share = 100 * statistics.median(cost.share_of_core for cost in found)
        per_s = statistics.median(cost.reports_per_s for cost in found)
        words = f"reports of {'busy' if is_busy else 'idle'} {fleet}, {per_s:,.0f} a second"
        report.add(Line(f"{words}: CPU of the router", share, "% of a core", most=most))
    for line in tokenizing.lines():
        report.add(line)
