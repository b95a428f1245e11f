"""Does a prediction of `tandem advise` hold on this machine? `python -m benchmarks.advise --parts live`, in 10 minutes.

`tandem calibrate` measures one prefill and one decode worker. The coarse workers of `tandem advise` then predict each
row of `make bench-goodput` for both shapes of two such workers, from the same arrivals, lengths, cached tokens and
limits, and only then the fleets serve it. Run it on a quiet machine with two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput.__main__ import (
    SHAPES,
    TTFT_FACTOR,
    Limits,
    alone_s,
    long_prompt_of,
    row_at,
    started,
    summarise,
)
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
RATES = (1.0, 2.0, 3.0, 4.0, 5.0)
TPOT_LIMIT_S = 0.1
LONGEST_PROMPT, LARGEST_BATCH = 1024, 16


def live(report: Report) -> None:
    trace = mooncake(TRACES / CONVERSATION, NUM_REQUESTS, INPUT_DIVISOR, OUTPUT_DIVISOR).requests
    model, limits = _calibrated(trace)
    report.say(f"TTFT within {limits.ttft_s * 1e3:.0f} ms, TPOT within {limits.tpot_s * 1e3:.0f} ms")
    rows, sweeps = [], []
    for name, (num_prefill, num_decode) in SHAPES.items():
        budget = model.widths[1].max_step_tokens
        shape = Shape(num_prefill, 1, budget, num_decode) if num_prefill else Shape(num_decode, 1, budget)
        expected = {rate: _predicted(model, shape, row_at(rate, trace).requests) for rate in RATES}
        predicted, measured = [], []
        with started(name, limits) as system:
            alone_s(system, trace[0])  # connects the workers
            for rate, served in expected.items():
                row = row_at(rate, trace)
                result = summarise(row, system.serve(row), limits)
                inside = sum(one.within(limits.ttft_s, limits.tpot_s) for one in served) / len(served)
                predicted.append((rate, inside))
                measured.append((rate, result.attainment))
                rows.append((
                    name, f"{rate:g}", f"{inside:.2f}", f"{result.attainment:.2f}",
                    f"{percentile(rising(one.ttft_s for one in served), 50) * 1e3:.0f} ms",
                    f"{result.ttft_p50 * 1e3:.0f} ms",
                    f"{percentile(rising(one.tpot_s for one in served), 50) * 1e3:.1f} ms",
                    f"{result.tpot_p50 * 1e3:.1f} ms",
                ))  # fmt: skip
        ours, theirs = goodput90(predicted), goodput90(measured)
        off = f"{ours / theirs - 1:+.0%}" if theirs else "no rate holds"
        sweeps.append((name, f"{ours:.2f}/s", f"{theirs:.2f}/s", off))
    report.add_table(
        ("shape", "requests/s", "inside, predicted", "measured", "TTFT p50, predicted", "measured",
         "TPOT p50, predicted", "measured"), rows,
    )  # fmt: skip
    report.add_table(("shape", "goodput, predicted", "measured", "off by"), sweeps)


def _calibrated(trace: Sequence[TraceRequest]) -> tuple[CostModel, Limits]:
    """Costs of the workers of this machine, and limits as those of `make bench-goodput`."""
    limits = Limits(1.0, TPOT_LIMIT_S)
    with tempfile.TemporaryDirectory() as folder, started("1P1D", limits) as system:
        path = Path(folder) / "costs.json"
        subprocess.run(
            [
                sys.executable, "-m", "cli.main", "calibrate", path, "--router", ADDRESS,
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
