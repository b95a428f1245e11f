"""Does a prediction of `tandem advise` hold on this machine? `python -m benchmarks.advise --parts live`, in 22 minutes.

`tandem calibrate` measures one prefill and one decode worker, and one worker with vLLM inside on both cores. The coarse
workers of `tandem advise` then predict each rate for both shapes of two such workers, and for vLLM alone, from the same
arrivals, lengths, cached tokens and limits. Only then the systems serve it:

    as modelled    every prompt on a prefill worker if there is one, no drafts, no prefixes from peers
    as shipped     with the defaults, which no coarse worker knows
    alone          vLLM's engine on both cores, without a server and without clients

A goodput lies between two rates: where every rate of RATES misses or holds, lower or higher ones follow, predicted and
measured alike. Run it on a quiet machine with two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from benchmarks.engine.programs import VLLM_KV_GB
from benchmarks.goodput.__main__ import SHAPES, Limits, RowResult, alone_s, long_prompt_of, row_at, started, summarise
from benchmarks.goodput.systems import ADDRESS, KV_MEMORY_MB, System, fleet
from benchmarks.report import Report
from benchmarks.traces import CONVERSATION, TRACES
from simulator.advice.goodput import BLOCK_SIZE
from simulator.advice.pools import Job
from simulator.advice.shapes import CostModel, Scenario, Shape
from simulator.calibration.costs import Costs, read_costs
from simulator.replay.replay_result import WANTED_ATTAINMENT, goodput90, percentile, rising
from simulator.replay.trace import TraceRequest, cached_tokens
from simulator.replay.workloads import mooncake

NUM_REQUESTS, INPUT_DIVISOR, OUTPUT_DIVISOR = 100, 32, 4  # as `make bench-goodput`
RATES = (2.0, 3.0, 4.0, 5.0)
LEAST_RATE, MOST_RATE = 0.5, 16.0  # requests/s that follow if all of RATES miss or hold
LOWER, HIGHER = 0.5, 1.25  # from one of these rates to the next
TTFT_FACTOR = 3.0  # of the 90th-percentile prompt alone; with 1.5, the longest prompts miss at every rate
TPOT_LIMIT_S = 0.1
LONGEST_PROMPT, LARGEST_BATCH = 1024, 16
AS_MODELLED = '[router]\nlocal_prefill = "never"\npeer_prefixes = "never"\n[engine]\nspeculation = "off"\n'
FLEETS = {"as modelled": AS_MODELLED, "as shipped": ""}  # the texts of their config files
VLLM_FLEET = ("--prefill", "0", "--decode", "1", "--engine", "vllm")  # whose one worker has both cores


class Attained(Protocol):
    @property
    def attainment(self) -> float: ...


AnyAttained = TypeVar("AnyAttained", bound=Attained)


class Predicted(NamedTuple):
    attainment: float
    ttft_p50: float
    tpot_p50: float


def live(report: Report) -> None:
    trace = mooncake(TRACES / CONVERSATION, NUM_REQUESTS, INPUT_DIVISOR, OUTPUT_DIVISOR).requests
    with started("1P1D", Limits(1.0, TPOT_LIMIT_S), AS_MODELLED) as system:
        costs = _calibrated()
        limits = Limits(TTFT_FACTOR * alone_s(system, long_prompt_of(trace)), TPOT_LIMIT_S)
    with fleet(VLLM_FLEET):
        vllm_costs = replace(_calibrated(), message_delay_s=0.0, token_bytes=costs.token_bytes)
    report.say(f"TTFT within {limits.ttft_s * 1e3:.0f} ms, TPOT within {limits.tpot_s * 1e3:.0f} ms")
    systems = [(name, FLEETS, costs, sizes, KV_MEMORY_MB) for name, sizes in SHAPES.items()]
    systems.append(("vllm", {"alone": ""}, vllm_costs, (0, 1), VLLM_KV_GB * 1024))
    rows, sweeps = [], []
    for name, configs, its_costs, (num_prefill, num_decode), kv_mb in systems:
        budget = its_costs.max_step_tokens
        shape = Shape(num_prefill, 1, budget, num_decode) if num_prefill else Shape(num_decode, 1, budget)
        model = CostModel({1: its_costs}, kv_mb * 2**20 // its_costs.token_bytes)
        predicted = cache(partial(_predicted, model, shape, trace, limits))
        expected = _goodput(_swept(predicted))
        for kind, config in configs.items():
            with started(name, limits, config) as system:
                alone_s(system, trace[0])  # connects the workers
                found = _swept(partial(_measured, system, trace, limits))
            report.say(f"{name} {kind}: inside {', '.join(f'{one.attainment:.2f} at {r:g}/s' for r, one in found)}")
            rows += [(name, kind, *_row(rate, predicted(rate), one)) for rate, one in found]
            goodput = _goodput(found)
            off = f"{expected / goodput - 1:+.0%}" if goodput else "no rate holds"
            sweeps.append((name, kind, f"{expected:.2f}/s", f"{goodput:.2f}/s", off))
    report.add_table(
        ("shape", "fleet", "requests/s", "inside, predicted", "measured", "TTFT p50, predicted", "measured",
         "TPOT p50, predicted", "measured"), rows,
    )  # fmt: skip
    report.add_table(("shape", "fleet", "goodput, predicted", "measured", "off by"), sweeps)


def _calibrated() -> Costs:
    """Of the fleet that serves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        subprocess.run(
            [
                sys.executable, "-m", "cli.main", "calibrate", path, "--router", ADDRESS, "--local-prefill", "never",
                "--longest-prompt", str(LONGEST_PROMPT), "--largest-batch", str(LARGEST_BATCH),
            ],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        return read_costs(str(path))


def _swept(at: Callable[[float], AnyAttained]) -> list[tuple[float, AnyAttained]]:
    """RATES, and lower or higher ones until one holds and one misses. By rising rate."""
    found = [(rate, at(rate)) for rate in RATES]
    while found[0][1].attainment < WANTED_ATTAINMENT and (lower := found[0][0] * LOWER) >= LEAST_RATE:
        found.insert(0, (lower, at(lower)))
    while found[-1][1].attainment >= WANTED_ATTAINMENT and (higher := found[-1][0] * HIGHER) <= MOST_RATE:
        found.append((higher, at(higher)))
    return found


def _goodput(found: Sequence[tuple[float, Attained]]) -> float:
    return goodput90([(rate, one.attainment) for rate, one in found])


def _predicted(model: CostModel, shape: Shape, trace: Sequence[TraceRequest], limits: Limits, rate: float) -> Predicted:
    requests = row_at(rate, trace).requests
    hits = cached_tokens(requests, BLOCK_SIZE)
    jobs = [Job(one.num_tokens, cached, one.num_output_tokens) for one, cached in zip(requests, hits, strict=True)]
    served = model.fleet(shape, Scenario("as modelled")).run(jobs, [one.arrives_at for one in requests])
    inside = sum(one.within(limits.ttft_s, limits.tpot_s) for one in served)
    ttft, tpot = rising(one.ttft_s for one in served), rising(one.tpot_s for one in served)
    return Predicted(inside / len(served), percentile(ttft, 50), percentile(tpot, 50))


def _measured(system: System, trace: Sequence[TraceRequest], limits: Limits, rate: float) -> RowResult:
    row = row_at(rate, trace)
    return summarise(row, system.serve(row), limits)


def _row(rate: float, predicted: Predicted, found: RowResult) -> tuple[str, ...]:
    return (
        f"{rate:g}", f"{predicted.attainment:.2f}", f"{found.attainment:.2f}",
        f"{predicted.ttft_p50 * 1e3:.0f} ms", f"{found.ttft_p50 * 1e3:.0f} ms",
        f"{predicted.tpot_p50 * 1e3:.1f} ms", f"{found.tpot_p50 * 1e3:.1f} ms",
    )  # fmt: skip
