"""R2: six clusters of Splitwise (Patel et al., ISCA 2024) within one power budget, from its own measured step times.

Of SplitwiseSim (github.com/Mutinifni/splitwise-sim, MIT): the times below, medians of the rows of data/perf_model.csv
with BLOOM-176B, its default model, tensor parallelism 8 and 128 output tokens; the clusters of
scripts/run_throughput_isopower.sh; the nine limits of notebooks/plots.ipynb; the sizes of its memory and link. A100 and
H100 are machines of eight GPUs. The lengths are those of Azure's conversations of 2023 (CC-BY-4.0), which the authors
published with the paper.

    as measured        a decode step takes longer with each sequence and with each token of their contexts
    as SplitwiseSim    looks a decode step of n sequences up where the table has prompts of n tokens in all, so that a
                       batch costs nearly nothing (performance_model.py, get_iteration_duration)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from benchmarks.report import Report
from benchmarks.traces import TRACES
from core.cost.step_cost import StepCost, StepWork
from simulator.advice.pools import Fleet, Handoff, Job, Worker, WorkerKind
from simulator.calibration.public_points import least_squares
from simulator.replay.replay_result import percentile, rising
from simulator.replay.trace import TraceRequest
from simulator.replay.workloads import azure

AZURE = TRACES / "azure" / "AzureLLMInferenceTrace_conv.csv"
TIMES_MS = (  # tokens of each prompt, prompts at once; prompt and token of an A100, of an H100 (0: not used)
    (128, 1, 79.67, 47.61, 48.28, 35.74), (256, 1, 99.16, 47.71, 51.18, 36.15), (512, 1, 173.81, 48.76, 75.49, 36.11),
    (512, 2, 286.83, 49.99, 131.25, 36.91), (512, 4, 528.63, 51.00, 238.83, 38.06),
    (1024, 1, 289.19, 48.80, 132.62, 35.48), (2048, 1, 540.41, 49.36, 253.11, 35.72),
    (512, 8, 0.0, 52.95, 0.0, 38.14), (512, 16, 0.0, 57.34, 0.0, 40.64), (512, 32, 0.0, 65.38, 0.0, 45.84),
    (512, 64, 0.0, 96.58, 0.0, 63.82),
)  # fmt: skip
OUTPUT_TOKENS = 128  # of each prompt
A100, H100 = range(2)
DESIGNS = {  # machines of the first pool, and of the decode pool
    "A100, undivided": (A100, 70, A100, 0),
    "H100, undivided": (H100, 40, H100, 0),
    "AA": (A100, 45, A100, 25),
    "HH": (H100, 25, H100, 15),
    "HA": (H100, 25, A100, 26),
    "HHcap": (H100, 25, H100, 21),  # with 0.7 of the power a decode machine takes no longer
}
PUBLISHED = {"A100, undivided": "1.00", "AA": "2.15"}  # the other rates are only in a figure
STEP_TOKENS = 2048
TOKEN_BYTES = 2 * 70 * 14_336 * 2
POOL_TOKENS = (8 * 80 * 2**30 - 329 * 10**9) // TOKEN_BYTES
HANDOFF = Handoff(200 * 2**30, 0.0, TOKEN_BYTES)
PERCENTS = (50, 90, 99)
LIMITS = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}  # times an unloaded A100
LASTS_S, RATE_STEP, MAX_RATE = 300, 2, 200  # of a run in seconds; requests/s


def splitwise(report: Report) -> None:
    lengths = azure(AZURE).requests
    for reading in ("as measured", "as SplitwiseSim"):
        is_theirs = reading == "as SplitwiseSim"
        costs = [fitted(report, name, place, is_theirs) for place, name in enumerate(("A100", "H100"))]
        rows = [(name, *highest_rate(lengths, design, costs, is_theirs)) for name, design in DESIGNS.items()]
        report.add_table(
            (f"design, {reading}", "requests/s", "beside undivided A100", "published", "beyond it"),
            [(name, rate, f"{rate / rows[0][1]:.2f}", PUBLISHED.get(name, ""), why) for name, rate, why in rows],
        )


def fitted(report: Report, name: str, place: int, is_theirs: bool) -> StepCost:
    terms: list[tuple[float, ...]] = []
    times = []
    for size, count, *found in TIMES_MS:
        prompt_ms, token_ms = found[2 * place], found[2 * place + 1]
        if prompt_ms:
            terms.append((1.0, 0.0, 0.0, count * size, count * size**2 / 2))
            times.append(prompt_ms / 1e3)
        if prompt_ms or not is_theirs:
            context = count * (size + OUTPUT_TOKENS / 2)
            terms.append((1.0, *((count * size, 0.0) if is_theirs else (count, context)), 0.0, 0.0))
            times.append(token_ms / 1e3)
    relative = np.array(terms) / np.array(times)[:, None]
    constants = least_squares(relative)
    errors = np.abs(relative @ constants - 1.0)
    report.say(f"{name}: steps fitted within {np.median(errors):.1%} in the median, {errors.max():.1%} at most")
    return StepCost(*constants.tolist())


def highest_rate(
    lengths: Sequence[TraceRequest], design: tuple[int, int, int, int], costs: Sequence[StepCost], is_theirs: bool
) -> tuple[int, str]:
    """Requests/s with which the design keeps the nine limits, and the limit that RATE_STEP more would miss."""
    first, num_first, decode, num_decode = design
    low, high, why = 0, MAX_RATE // RATE_STEP, ""
    while high - low > 1:
        middle = (low + high) // 2
        fleet = Fleet(workers(costs[first], num_first), workers(costs[decode], num_decode), HANDOFF)
        missed = first_missed(lengths, fleet, middle * RATE_STEP, costs[A100], is_theirs)
        low, high, why = (low, middle, missed) if missed else (middle, high, why)
    return low * RATE_STEP, why


def workers(cost: StepCost, num_workers: int) -> list[Worker]:
    return [Worker(WorkerKind(1, cost, STEP_TOKENS, POOL_TOKENS, 0.0)) for _ in range(num_workers)]


def first_missed(lengths: Sequence[TraceRequest], fleet: Fleet, rate: int, alone: StepCost, is_theirs: bool) -> str:
    """The first of the nine limits that a run at this rate misses; empty if it keeps all."""
    chance = random.Random("Splitwise")
    jobs = [
        Job(chance.choice(lengths).num_tokens, 0, chance.choice(lengths).num_output_tokens)
        for _ in range(rate * LASTS_S)
    ]  # prompts and outputs are independent in their traces, too
    times = accumulate(chance.expovariate(rate) for _ in jobs)
    slower: dict[str, list[float]] = {name: [] for name in LIMITS}
    for job, one in zip(jobs, fleet.run(jobs, times), strict=True):
        ttft_s = alone.step_s + alone.prompt_seconds(job.num_prompt_tokens)
        context = job.num_prompt_tokens + job.num_output_tokens // 2
        work = StepWork(job.num_prompt_tokens if is_theirs else 1, context, 0, 0.0)
        tbt_s, steps = alone.seconds(work), job.num_output_tokens - 1
        slower["TTFT"].append(one.ttft_s / ttft_s)
        slower["E2E"].append((one.ttft_s + steps * (one.tpot_s or 0.0)) / (ttft_s + steps * tbt_s))
        if one.tpot_s is not None:
            slower["TBT"].append(one.tpot_s / tbt_s)
    for name, limits in LIMITS.items():
        values = rising(slower[name])
        for percent, limit in zip(PERCENTS, limits, strict=True):
            if percentile(values, percent) > limit:
                return f"{name} p{percent} above {limit:g} x"
    return ""
