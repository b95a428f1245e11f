"""Does a prediction of `tandem advise` hold on this machine? `python -m benchmarks.advise --parts live`, in 12 minutes.

`tandem calibrate` measures one prefill and one decode worker. The coarse workers of `tandem advise` then predict each
rate for both shapes of two such workers, from the same arrivals, lengths, cached tokens and limits, and only then the
fleets serve it, twice:

    as modelled    every prompt on a prefill worker if there is one, no drafts, no prefixes from peers
    as shipped     with the defaults, which no coarse worker knows

Run it on a quiet machine with two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput.__main__ import SHAPES, Limits, RowResult, alone_s, long_prompt_of, row_at, started, summarise
from benchmarks.goodput.systems import ADDRESS, KV_MEMORY_MB
from benchmarks.report import Report
from benchmarks.traces import CONVERSATION, TRACES
from simulator.advice.goodput import BLOCK_SIZE
from simulator.advice.pools import Job, Served
from simulator.advice.shapes import CostModel, Scenario, Shape
from simulator.calibration.costs import read_costs
from simulator.replay.replay_result import goodput90, percentile, rising
from simulator.replay.trace import TraceRequest, cached_tokens
from simulator.replay.workloads import mooncake

NUM_REQUESTS, INPUT_DIVISOR, OUTPUT_DIVISOR = 100, 32, 4  # as `make bench-goodput`
RATES = (2.0, 3.0, 4.0, 5.0)
TTFT_FACTOR = 3.0  # of the 90th-percentile prompt alone; with 1.5, the longest prompts miss at every rate
TPOT_LIMIT_S = 0.1
LONGEST_PROMPT, LARGEST_BATCH = 1024, 16
AS_MODELLED = '[router]\nlocal_prefill = "never"\npeer_prefixes = "never"\n[engine]\nspeculation = "off"\n'
FLEETS = {"as modelled": AS_MODELLED, "as shipped": ""}  # the texts of their config files


def live(report: Report) -> None:
    trace = mooncake(TRACES / CONVERSATION, NUM_REQUESTS, INPUT_DIVISOR, OUTPUT_DIVISOR).requests
    model, limits = _calibrated(trace)
    report.say(f"TTFT within {limits.ttft_s * 1e3:.0f} ms, TPOT within {limits.tpot_s * 1e3:.0f} ms")
    rows, sweeps = [], []
    for name, (num_prefill, num_decode) in SHAPES.items():
        budget = model.widths[1].max_step_tokens
        shape = Shape(num_prefill, 1, budget, num_decode) if num_prefill else Shape(num_decode, 1, budget)
        served = {rate: _predicted(model, shape, row_at(rate, trace).requests) for rate in RATES}
        predicted = goodput90([(rate, _attainment(found, limits)) for rate, found in served.items()])
        goodputs = []
        for fleet, config in FLEETS.items():
            measured = _measured(name, limits, trace, config)
            found_inside = ", ".join(f"{found.attainment:.2f} at {rate:g}/s" for rate, found in measured.items())
            report.say(f"{name} {fleet}: inside {found_inside}")
            goodputs.append(goodput90([(rate, found.attainment) for rate, found in measured.items()]))
            rows += [(name, fleet, *_row(rate, served[rate], found, limits)) for rate, found in measured.items()]
        off = f"{predicted / goodputs[0] - 1:+.0%}" if goodputs[0] else "no rate holds"
        sweeps.append((name, f"{predicted:.2f}/s", *(f"{found:.2f}/s" for found in goodputs), off))
    report.add_table(
        ("shape", "fleet", "requests/s", "inside, predicted", "measured", "TTFT p50, predicted", "measured",
         "TPOT p50, predicted", "measured"), rows,
    )  # fmt: skip
    report.add_table(("shape", "goodput, predicted", *(f"measured {name}" for name in FLEETS), "off by"), sweeps)


def _calibrated(trace: Sequence[TraceRequest]) -> tuple[CostModel, Limits]:
    """Costs of the workers of this machine, and limits."""
    limits = Limits(1.0, TPOT_LIMIT_S)
    with tempfile.TemporaryDirectory() as folder, started("1P1D", limits, AS_MODELLED) as system:
        path = Path(folder) / "costs.json"
        subprocess.run(
            [
                sys.executable, "-m", "cli.main", "calibrate", path, "--router", ADDRESS, "--local-prefill", "never",
                "--longest-prompt", str(LONGEST_PROMPT), "--largest-batch", str(LARGEST_BATCH),
            ],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        costs = read_costs(str(path))
        limits = Limits(TTFT_FACTOR * alone_s(system, long_prompt_of(trace)), TPOT_LIMIT_S)
    return CostModel({1: costs}, KV_MEMORY_MB * 2**20 // costs.token_bytes), limits


def _predicted(model: CostModel, shape: Shape, requests: Sequence[TraceRequest]) -> list[Served]:
    hits = cached_tokens(requests, BLOCK_SIZE)
    jobs = [Job(one.num_tokens, cached, one.num_output_tokens) for one, cached in zip(requests, hits, strict=True)]
    return model.fleet(shape, Scenario("as modelled")).run(jobs, [one.arrives_at for one in requests])


def _measured(name: str, limits: Limits, trace: Sequence[TraceRequest], config: str) -> dict[float, RowResult]:
    with started(name, limits, config) as system:
        alone_s(system, trace[0])  # connects the workers
        rows = {rate: row_at(rate, trace) for rate in RATES}
        return {rate: summarise(row, system.serve(row), limits) for rate, row in rows.items()}


def _attainment(served: Sequence[Served], limits: Limits) -> float:
    return sum(one.within(limits.ttft_s, limits.tpot_s) for one in served) / len(served)


def _row(rate: float, served: Sequence[Served], found: RowResult, limits: Limits) -> tuple[str, ...]:
    ttft, tpot = (rising(times) for times in ((one.ttft_s for one in served), (one.tpot_s for one in served)))
    return (
        f"{rate:g}", f"{_attainment(served, limits):.2f}", f"{found.attainment:.2f}",
        f"{percentile(ttft, 50) * 1e3:.0f} ms", f"{found.ttft_p50 * 1e3:.0f} ms",
        f"{percentile(tpot, 50) * 1e3:.1f} ms", f"{found.tpot_p50 * 1e3:.1f} ms",
    )  # fmt: skip
