"""Requests inside their limits, live on this machine: Tandem's two shapes beside vLLM: `make bench-goodput`.

The same requests arrive at every system: the first of the Mooncake conversation trace, prompts / 32, outputs / 4, at
random times of a given rate. A row is one rate. Its limit for the time to the first token (TTFT) is 1.5 times the time
of its 90th-percentile prompt alone on one core of this machine; the limit for the time per output token (TPOT) is
100 ms. A slow machine needs shorter prompts and a longer limit: 100 ms is five times the step of a lone request on a
core with AVX-512. A request is *inside* if it meets both. Attainment is the share of such requests, goodput their
number a second. Errors, refusals and time-outs are outside.

    1P1D    one prefill and one decode worker
    0P2D    two decode workers, which prefill themselves: the undivided shape
    vllm    vLLM's CPU build on both cores, without a server and without clients
    vllm-1P1D, vllm-0P2D    the same two shapes with vLLM inside the workers, one core each: `make bench-vllm`

TBT10 is the mean of the worst tenth of a request's gaps between tokens. goodput90 is the highest rate with an
attainment of 0.9, interpolated between the rows. Repeats take the systems in turns; rows are medians over the repeats,
and two figures that differ by less than their own repeats do are a tie.

Run it on a quiet machine with two cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.asking import Answer, arrivals
from benchmarks.goodput.systems import Row, System, fleet, vllm
from benchmarks.report import Line, Report, number, parser_of
from benchmarks.traces import CONVERSATION, TRACES
from simulator.replay.replay_result import goodput90, percentile, rising, worst_tenth_mean
from simulator.replay.trace import TraceRequest
from simulator.replay.workloads import mooncake

TTFT_FACTOR, TTFT_PERCENT = 1.5, 90
TAIL_S = 60.0  # after the last arrival; a request without its end by then has failed
ALONE_REPEATS = 3
SHAPES = {"1P1D": (1, 1), "0P2D": (0, 2)}  # prefill and decode workers
INSIDE = "vllm-"  # of the names of shapes with vLLM inside their workers
SYSTEMS = (*SHAPES, "vllm", *(INSIDE + shape for shape in SHAPES))
COMPARED = (  # a system, the one beside it, a field of RowResult, its unit, the least ratio of their speeds
    ("1P1D", "0P2D", "attainment", "", 1.0),
    ("1P1D", "0P2D", "goodput", "requests/s", 1.0),
    ("1P1D", "vllm", "tbt10_p90", "ms", 4.0),
    (INSIDE + "1P1D", "vllm", "tbt10_p90", "ms", 2.0),
    (INSIDE + "1P1D", "vllm", "goodput", "requests/s", 1.0),
)
MEASURES = {"attainment": 1.0, "goodput": 1.0, "ttft_p50": 1.0, "ttft_p90": 1.0, "tpot_p50": 1e3, "tbt10_p90": 1e3}
COLUMNS = ("attainment", "goodput/s", "TTFT p50, s", "p90, s", "TPOT p50, ms", "TBT10 p90, ms")


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RowResult:
    attainment: float
    goodput: float  # requests a second
    ttft_p50: float  # seconds; requests without a token count as infinite
    ttft_p90: float
    tpot_p50: float
    tbt10_p90: float
    num_failed: int  # without their last token
    num_late: int  # first tokens beyond the limit
    num_slow: int  # requests beyond the limit of TPOT
    ttft_error: float | None  # median of |promised - measured| / measured; None without a router


Results = dict[tuple[str, float], list[RowResult]]  # by system and rate, one for each repeat


def summarise(row: Row, answers: Sequence[Answer], limits: Limits) -> RowResult:
    inside = num_failed = 0
    errors = []
    all_ttft, all_tpot, all_tbt10 = [], [], []
    for request, answer in zip(row.requests, answers, strict=True):
        ttft = answer.times[0] - request.arrives_at if answer.times else math.inf
        tpot = answer.tpot_s
        if answer.promised_ttft_s is not None and ttft < math.inf:
            errors.append(abs(answer.promised_ttft_s - ttft) / ttft)
        failed = bool(answer.error) or len(answer.times) < request.num_output_tokens
        num_failed += failed
        inside += not failed and ttft <= limits.ttft_s and (tpot is None or tpot <= limits.tpot_s)
        all_ttft.append(ttft)
        all_tpot.append(tpot)
        all_tbt10.append(worst_tenth_mean(answer.gaps) if answer.gaps else None)
    ttfts, tpots = rising(all_ttft), rising(all_tpot)
    last = max((answer.times[-1] for answer in answers if answer.times), default=row.timeout_s)
    return RowResult(
        attainment=inside / len(answers),
        goodput=inside / last,
        ttft_p50=percentile(ttfts, 50),
        ttft_p90=percentile(ttfts, 90),
        tpot_p50=percentile(tpots, 50),
        tbt10_p90=percentile(rising(all_tbt10), 90),
        num_failed=num_failed,
        num_late=sum(seconds > limits.ttft_s for seconds in ttfts),
        num_slow=sum(seconds > limits.tpot_s for seconds in tpots),
        ttft_error=statistics.median(errors) if errors else None,
    )


def row_at(rate: float, trace: Sequence[TraceRequest]) -> Row:
    times = arrivals(rate, len(trace))
    return Row([replace(request, arrives_at=at) for request, at in zip(trace, times, strict=True)], times[-1] + TAIL_S)


def long_prompt_of(trace: Sequence[TraceRequest]) -> TraceRequest:
    """Whose time alone gives the limit of TTFT."""
    return sorted(trace, key=lambda request: request.num_tokens)[len(trace) * TTFT_PERCENT // 100]


def alone_s(system: System, request: TraceRequest) -> float:
    """Seconds to the first token of a prompt alone: the median of a few, none from a cache."""
    row = Row([replace(request, arrives_at=0.0, num_output_tokens=2)], TAIL_S)
    return statistics.median(system.serve(row)[0].times[0] for _ in range(ALONE_REPEATS))


def started(name: str, limits: Limits, config: str = "") -> AbstractContextManager[System]:
    """`config`: the text of a fleet's config file."""
    if name == "vllm":
        return vllm()
    prefill, decode = map(str, SHAPES[name.removeprefix(INSIDE)])
    slo = ["--slo-ttft-ms", str(round(limits.ttft_s * 1e3)), "--slo-itl-ms", str(round(limits.tpot_s * 1e3))]
    engine = ["--engine", "vllm"] if name.startswith(INSIDE) else []
    return fleet(["--prefill", prefill, "--decode", decode, *engine, *slo], config)


def report_rows(report: Report, results: Results, systems: Sequence[str]) -> None:
    """A table of the medians, lines of the compared systems at each rate, and the sweep of each system."""
    rates = sorted({rate for _, rate in results})

    def median(name: str, rate: float, measure: str) -> float:
        return statistics.median(getattr(result, measure) for result in results[name, rate])

    rows = []
    for rate in rates:
        for name in systems:
            of_repeats = results[name, rate]
            found = [result.attainment for result in of_repeats]
            cells = [median(name, rate, measure) * scale for measure, scale in MEASURES.items()]
            failed = sum(result.num_failed for result in of_repeats)
            rows.append((f"{rate:g}", name, *map(number, cells), failed, number(max(found) - min(found))))
    report.add_table(("rate", "system", *COLUMNS, "failed", "apart"), rows)
    for rate in rates:
        for ours, theirs, measure, unit, least in COMPARED:
            if ours in systems and theirs in systems:
                values = [median(name, rate, measure) * (1e3 if unit == "ms" else 1.0) for name in (ours, theirs)]
                what = f"rate {rate:g}: {measure.replace('_', ' ')} of {ours}"
                report.add(Line(what, values[0], unit, theirs, values[1], least_ratio=least))
    sweeps = {name: goodput90([(rate, median(name, rate, "attainment")) for rate in rates]) for name in systems}
    for name in systems:
        line = Line(f"goodput90 of {name}", sweeps[name], "requests/s")
        is_beside = name == "1P1D" and "vllm" in systems
        report.add(replace(line, peer="vllm", peer_value=sweeps["vllm"], least_ratio=2.0) if is_beside else line)


def measure(report: Report, arguments: argparse.Namespace, trace: Sequence[TraceRequest], limits: Limits) -> Results:
    """A system that fails leaves the turn of its repeat alone."""
    results: defaultdict[tuple[str, float], list[RowResult]] = defaultdict(list)
    for repeat in range(1, arguments.repeats + 1):
        for name in arguments.systems:
            with report.section(f"repeat {repeat}, {name}"), started(name, limits) as system:
                alone_s(system, trace[0])
                for rate in arguments.rates:
                    row = row_at(rate, trace)
                    result = summarise(row, system.serve(row), limits)
                    results[name, rate].append(result)
                    report.add(Line(f"repeat {repeat}, {name}, rate {rate:g}: attainment", result.attainment, ""))
                    report.say(
                        f"  goodput {result.goodput:.2f}/s, TTFT p90 {result.ttft_p90:.2f} s, "
                        f"TBT10 p90 {result.tbt10_p90 * 1e3:.0f} ms; {result.num_late} first tokens late, "
                        f"{result.num_slow} too slow, {result.num_failed} failed"
                        + ("" if result.ttft_error is None else f"; promised TTFT off by {result.ttft_error:.0%}")
                    )
    return results


def main() -> None:
    parser = parser_of(__doc__, repeats=1)
    parser.add_argument("--trace", type=Path, default=TRACES / CONVERSATION, help="a trace in the format of Mooncake")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0, 3.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=100, help="of a row")
    parser.add_argument("--input-divisor", type=int, default=32, help="of the lengths of prompts")
    parser.add_argument("--output-divisor", type=int, default=4, help="of the lengths of outputs")
    parser.add_argument("--tpot-limit", type=float, default=0.1, help="seconds")
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        sys.exit(f"no trace at {arguments.trace}: benchmarks/traces.py says where it is from")
    divisors = arguments.input_divisor, arguments.output_divisor
    trace = mooncake(arguments.trace, arguments.requests, *divisors).requests
    long_prompt, report = long_prompt_of(trace), Report("goodput")
    limits = Limits(1.0, arguments.tpot_limit)
    with started("0P2D", limits) as system:
        alone_s(system, trace[0])  # connects the workers
        limits = replace(limits, ttft_s=TTFT_FACTOR * alone_s(system, long_prompt))
    report.say(
        f"{len(trace)} requests a row, mean prompt {statistics.fmean(r.num_tokens for r in trace):.0f} tokens, mean "
        f"output {statistics.fmean(r.num_output_tokens for r in trace):.0f}; limits: TTFT {limits.ttft_s:.2f} s (1.5 x "
        f"{long_prompt.num_tokens} tokens alone), TPOT {limits.tpot_s * 1e3:g} ms"
    )
    results = measure(report, arguments, trace, limits)
    whole = [name for name in arguments.systems if all(results[name, rate] for rate in arguments.rates)]
    report_rows(report, {key: found for key, found in results.items() if key[0] in whole}, whole)
    report.write()


if __name__ == "__main__":
    main()
