"""Requests inside their limits, live on this machine: Tandem's two shapes beside vLLM: `make bench-goodput`.

The same requests arrive at every system: the first of the Mooncake conversation trace, prompts / 32, outputs / 4, at
random times of a given rate. A row is one rate. Its limit for the time to the first token (TTFT) is 1.5 times the time
of its 90th-percentile prompt alone on one core of this machine; the limit for the time per output token (TPOT) is
100 ms. A slow machine needs shorter prompts and a longer limit: 100 ms is five times the step of a lone request on a
core with AVX-512. A request is *inside* if it meets both. Attainment is the share of such requests, goodput their
number a second. Errors, refusals and time-outs are outside.

    1P1D    one prefill and one decode worker
    0P2D    two decode workers, which prefill themselves: the undivided shape
    before-N    1P1D of an earlier checkout (--before), in which decode workers prefill up to N uncached tokens
    vllm    vLLM's CPU build on both cores, without a server and without clients

TBT10 is the mean of the worst tenth of a request's gaps between tokens. goodput90 is the highest rate with an
attainment of 0.9, interpolated between the rows. Repeats take the systems in turns; rows are medians over the repeats,
and two figures that differ by less than their own repeats do are a tie.

Run it on a quiet machine with two cores. The trace is `FAST25-release/traces/conversation_trace.jsonl` of
kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.goodput.systems import Answer, Row, System, fleet, vllm
from benchmarks.report import Line, Report
from benchmarks.routers import TRACE
from simulator.replay_result import RequestRecord, goodput90, percentile, rising, worst_tenth_mean
from simulator.trace import TraceRequest
from simulator.workloads import mooncake

TTFT_FACTOR, TTFT_PERCENT = 1.5, 90
TAIL_S = 60.0  # after the last arrival; a request without its end by then has failed
ALONE_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tpot_s: float


def record_of(request: TraceRequest, answer: Answer) -> RequestRecord:
    """A request without its last token has failed."""
    times = answer.times
    gaps = [after - before for before, after in pairwise(times)]
    unfinished = "" if len(times) >= request.num_output_tokens else "not finished"
    return RequestRecord(
        request_id="",
        arrived_at=request.arrives_at,
        num_prompt_tokens=request.num_tokens,
        num_output_tokens=len(times),
        ttft_s=times[0] - request.arrives_at if times else None,
        tpot_s=statistics.fmean(gaps) if gaps else None,
        tbt10_s=worst_tenth_mean(gaps) if gaps else None,
        error=answer.error or unfinished,
    )


@dataclass(frozen=True, slots=True)
class RowResult:
    attainment: float
    goodput: float  # requests a second
    ttft_p50: float  # seconds; requests without a token count as infinite
    ttft_p90: float
    tpot_p50: float
    tbt10_p90: float
    num_failed: int
    num_late: int  # first tokens beyond the limit
    num_slow: int  # requests beyond the limit of TPOT


def summarise(row: Row, answers: Sequence[Answer], limits: Limits) -> RowResult:
    records = [record_of(request, answer) for request, answer in zip(row.requests, answers, strict=True)]
    inside = sum(record.within(limits.ttft_s, limits.tpot_s) for record in records)
    ttft = rising(math.inf if record.ttft_s is None else record.ttft_s for record in records)
    tpot = rising(record.tpot_s for record in records)
    last = max((answer.times[-1] for answer in answers if answer.times), default=row.timeout_s)
    return RowResult(
        attainment=inside / len(records),
        goodput=inside / last,
        ttft_p50=percentile(ttft, 50),
        ttft_p90=percentile(ttft, 90),
        tpot_p50=percentile(tpot, 50),
        tbt10_p90=percentile(rising(record.tbt10_s for record in records), 90),
        num_failed=sum(bool(record.error) for record in records),
        num_late=sum(seconds > limits.ttft_s for seconds in ttft),
        num_slow=sum(seconds > limits.tpot_s for seconds in tpot),
    )


def row_at(rate: float, trace: Sequence[TraceRequest]) -> Row:
    """Poisson arrivals, equal for every system and repeat."""
    chance, now = random.Random(f"arrivals at {rate:g}"), 0.0
    requests = []
    for request in trace:
        now += chance.expovariate(rate)
        requests.append(replace(request, arrives_at=now))
    return Row(requests, now + TAIL_S)


def alone_s(system: System, request: TraceRequest) -> float:
    """Seconds to the first token of a prompt alone: the median of a few, none from a cache."""
    row = Row([replace(request, arrives_at=0.0, num_output_tokens=2)], TAIL_S)
    return statistics.median(system.serve(row)[0].times[0] for _ in range(ALONE_REPEATS))


def started(name: str, arguments: argparse.Namespace, limits: Limits) -> AbstractContextManager[System]:
    flags = ["--slo-ttft-ms", str(round(limits.ttft_s * 1e3)), "--slo-itl-ms", str(round(limits.tpot_s * 1e3))]
    if name == "vllm":
        return vllm()
    if name == "1P1D":
        return fleet(["--prefill", "1", "--decode", "1", *flags])
    if name == "0P2D":
        return fleet(["--prefill", "0", "--decode", "2", *flags])
    threshold = name.removeprefix("before-")
    chunk = ["--max-batched-tokens", "256"] if int(threshold) > 48 else []
    flags = ["--prefill", "1", "--decode", "1", "--local-prefill-tokens", threshold, *chunk]
    return fleet(flags, checkout=arguments.before)


def report_rows(report: Report, results: dict[tuple[str, float], list[RowResult]], systems: Sequence[str]) -> None:
    rates = sorted({rate for _, rate in results})
    rivals = [name for name in systems if name not in ("1P1D", "vllm")] if "1P1D" in systems else []

    def median(name: str, rate: float, measure: str) -> float:
        return statistics.median(getattr(result, measure) for result in results[name, rate])

    report.say("\nrate  system       attainment  goodput/s  TTFT p50, p90 s  TPOT p50 ms  TBT10 p90 ms  failed  apart")
    for rate in rates:
        for name in systems:
            found = [result.attainment for result in results[name, rate]]
            report.say(
                f"{rate:4g}  {name:12s} {median(name, rate, 'attainment'):10.2f} {median(name, rate, 'goodput'):10.2f}"
                f"  {median(name, rate, 'ttft_p50'):7.2f} {median(name, rate, 'ttft_p90'):7.2f}"
                f" {median(name, rate, 'tpot_p50') * 1e3:12.0f} {median(name, rate, 'tbt10_p90') * 1e3:13.0f}"
                f" {sum(result.num_failed for result in results[name, rate]):7d} {max(found) - min(found):9.2f}"
            )
    for rate in rates:
        for rival in rivals:
            for measure, unit in (("attainment", ""), ("goodput", "requests/s")):
                line = Line(
                    f"rate {rate:g}: {measure} of 1P1D", median("1P1D", rate, measure), unit, rival,
                    median(rival, rate, measure), least_ratio=2.5 if rival == "before-48" and rate == 2 else 1.0,
                )  # fmt: skip
                report.add(line)
        if "vllm" in systems and "1P1D" in systems:
            tbt10 = [median(name, rate, "tbt10_p90") * 1e3 for name in ("1P1D", "vllm")]
            report.add(Line(f"rate {rate:g}: TBT10 p90 of 1P1D", tbt10[0], "ms", "vLLM", tbt10[1], least_ratio=4.0))
    sweeps = {name: goodput90([(rate, median(name, rate, "attainment")) for rate in rates]) for name in systems}
    for name in systems:
        peer = ("vLLM", sweeps["vllm"], 2.0) if name == "1P1D" and "vllm" in systems else ("", None, None)
        report.add(Line(f"goodput90 of {name}", sweeps[name], "requests/s", *peer[:2], least_ratio=peer[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="a trace in the format of Mooncake")
    parser.add_argument("--systems", nargs="+", default=["1P1D", "0P2D", "vllm"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0, 3.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=100, help="of a row")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--before", type=Path, help="checkout with --local-prefill-tokens, for the systems before-N")
    parser.add_argument("--input-divisor", type=int, default=32, help="of the lengths of prompts")
    parser.add_argument("--output-divisor", type=int, default=4, help="of the lengths of outputs")
    parser.add_argument("--tpot-limit", type=float, default=0.1, help="seconds")
    parser.add_argument("--ttft-limit", type=float, help="seconds; default: 1.5 x the 90th-percentile prompt alone")
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        sys.exit(f"no trace at {arguments.trace}: {(__doc__ or '').splitlines()[-2]}")
    divisors = arguments.input_divisor, arguments.output_divisor
    trace = mooncake(arguments.trace, arguments.requests, *divisors).requests
    long_prompt = sorted(trace, key=lambda r: r.num_tokens)[len(trace) * TTFT_PERCENT // 100]
    report = Report("goodput")
    limits = Limits(arguments.ttft_limit or 1.0, arguments.tpot_limit)
    if arguments.ttft_limit is None:
        with started("0P2D", arguments, limits) as system:
            alone_s(system, trace[0])  # connects the workers
            limits = replace(limits, ttft_s=TTFT_FACTOR * alone_s(system, long_prompt))
    report.say(
        f"{len(trace)} requests a row, mean prompt {statistics.fmean(r.num_tokens for r in trace):.0f} tokens, mean "
        f"output {statistics.fmean(r.num_output_tokens for r in trace):.0f}; limits: TTFT {limits.ttft_s:.2f} s (1.5 x "
        f"{long_prompt.num_tokens} tokens alone), TPOT {limits.tpot_s * 1e3:g} ms"
    )
    results: defaultdict[tuple[str, float], list[RowResult]] = defaultdict(list)
    for repeat in range(arguments.repeats):
        for name in arguments.systems:
            with contextlib.ExitStack() as stack:
                system = stack.enter_context(started(name, arguments, limits))
                alone_s(system, trace[0])
                for rate in arguments.rates:
                    row = row_at(rate, trace)
                    result = summarise(row, system.serve(row), limits)
                    results[name, rate].append(result)
                    report.say(
                        f"repeat {repeat + 1}, {name}, rate {rate:g}: attainment {result.attainment:.2f}, goodput "
                        f"{result.goodput:.2f}/s, TTFT p90 {result.ttft_p90:.2f} s, "
                        f"TBT10 p90 {result.tbt10_p90 * 1e3:.0f} ms; {result.num_late} first tokens late, "
                        f"{result.num_slow} too slow, {result.num_failed} failed"
                    )
    report_rows(report, dict(results), arguments.systems)
    report.write()


if __name__ == "__main__":
    main()
