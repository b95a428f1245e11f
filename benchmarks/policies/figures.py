"""The figures of a case: a table of all policies, and a line for each goal beside the best rival."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.policies.cases import Case
from benchmarks.policies.rivals import OURS, Named
from benchmarks.replays import Measure, percent_ms, ttft_ms
from benchmarks.report import Line
from simulator.replay_result import ReplayResult

WITHIN = 0.02  # of the best rival
Results = Mapping[Named, Sequence[ReplayResult]]  # one for each seed


MEASURES = (
    Measure("TTFT p50", "ms", ttft_ms(50), is_goal=True),
    Measure("TTFT p90", "ms", ttft_ms(90), is_goal=True),
    Measure("TTFT p99", "ms", ttft_ms(99)),
    Measure("attainment", "", lambda result: result.attainment, is_goal=True),
    Measure("hit ratio", "", lambda result: result.hit_ratio),
    Measure("TPOT p50", "ms", percent_ms("tpot_s", 50)),
    Measure("TPOT p90", "ms", percent_ms("tpot_s", 90)),
    Measure("TBT10 p90", "ms", percent_ms("tbt10_s", 90)),
)


def case_table(results: Results) -> str:
    """Markdown: medians over the seeds, the best of each column in bold."""
    columns = [[measure.median(found) for found in results.values()] for measure in MEASURES]
    best = [(min if m.unit else max)(column) for m, column in zip(MEASURES, columns, strict=True)]
    heads = ["policy", *(f"{measure.name} {measure.unit}".strip() for measure in MEASURES)]
    rows = [heads, ["---"] * len(heads)]
    for policy, values in zip(results, zip(*columns, strict=True), strict=True):
        cells = [_cell(m, value, value == top) for m, value, top in zip(MEASURES, values, best, strict=True)]
        rows.append([policy.name, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(measure: Measure, value: float, is_best: bool) -> str:
    text = "failed" if math.isinf(value) else f"{value:,.0f}" if measure.unit and value >= 100 else f"{value:.3g}"
    return f"**{text}**" if is_best else text


def goal_lines(case: Case, results: Results) -> list[Line]:
    """Ours beside the best rival of each goal; the rival with the least spare is the peer."""
    lines = []
    for measure in MEASURES:
        if measure.is_goal:
            of_rivals = {policy: measure.median(found) for policy, found in results.items() if policy is not OURS}
            peer = (min if measure.unit else max)(of_rivals, key=lambda policy: of_rivals[policy])
            name, ours = f"{case.title}: {measure.name}", measure.median(results[OURS])
            lines.append(Line(name, ours, measure.unit, peer.name, of_rivals[peer], least_ratio=round(1 - WITHIN, 3)))
    return lines
