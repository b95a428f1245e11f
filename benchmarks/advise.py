"""What `tandem advise` would have said about published results, and how far its coarse workers are off.

    machines    the coarse workers beside the production machines of `tandem simulate`, on the same arrivals
    distserve   R1: the best placement of OPT-13B, and its rate
    dynamo      R3 b: one H100 beside 1P1D with ten requests at once, from Dynamo's guide
    vllm        R3 a: two replicas beside 1P1D at 3.6 requests/s
    splitwise   R2: six clusters within one power budget
    live        two fleets and vLLM on this machine, predicted and then measured: 22 minutes, so only where it is named

Each is one table, misses included.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.advise_live import live
from benchmarks.advise_splitwise import splitwise
from benchmarks.report import Report, parser_of, run_parts
from core.cost.step_cost import StepCost
from simulator.advice.goodput import Load, Search, Slo
from simulator.advice.pools import Fleet, Job
from simulator.advice.shapes import CostModel, Scenario, Shape
from simulator.calibration.costs import Costs, built_in_widths
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import percentile, rising
from simulator.replay.workloads import Synthetic, synthetic
from simulator.shells.cost_model import LinkCost

H100_8B = CostModel(built_in_widths("h100-8b"), 400_000)
AS_IT_IS = Scenario("as modelled")
TICK_S = 1e-3  # between two looks of clients that wait for answers
EFA_GB = 9.6  # of a link in Dynamo's guide, measured there


def relative(ours: float, theirs: float) -> str:
    return f"{ours / theirs - 1.0:+.0%}"


# ---- the production machines


def machines(report: Report) -> None:
    rows = []
    workload = synthetic(Synthetic(num_requests=500, prompt_tokens=2000, output_tokens=200))
    for num_prefill, num_decode in ((2, 2), (0, 4)):
        for rate in (8.0, 16.0, 24.0, 32.0):
            config = ReplayConfig(num_prefill=num_prefill, num_decode=num_decode, rate=rate)
            config = replace(config, router=replace(config.router, local_prefill="never"))
            replay = Replay(workload, config)
            jobs = [Job(one.num_tokens, 0, one.num_output_tokens) for one in replay.trace]
            shape = Shape(num_prefill, 1, 8192, num_decode) if num_prefill else Shape(num_decode, 1, 8192)
            coarse = H100_8B.fleet(shape, AS_IT_IS).run(jobs, [one.arrives_at for one in replay.trace])
            exact = replay.run()
            ttft_s, tpot_s = percentile(exact.ttft_s, 50), percentile(exact.tpot_s, 50)
            coarse_ttft_s = percentile(rising(one.ttft_s for one in coarse), 50)
            coarse_tpot_s = percentile(rising(one.tpot_s for one in coarse), 50)
            rows.append(
                (
                    f"{num_prefill}P{num_decode}D", f"{rate:g}", f"{ttft_s * 1e3:.0f} ms",
                    relative(coarse_ttft_s, ttft_s), f"{tpot_s * 1e3:.1f} ms", relative(coarse_tpot_s, tpot_s),
                )
            )  # fmt: skip
    report.add_table(("shape", "requests/s", "TTFT p50, machines", "coarse", "TPOT p50, machines", "coarse"), rows)


# ---- DistServe

PREFILL_1 = StepCost(18.10e-3, 0.0, 0.0, 1.0191e-4, 2 * 7.122e-9)
PREFILL_2 = StepCost(14.74e-3, 0.0, 0.0, 6.86e-5, 2 * 2.45e-9)
DECODE_1 = StepCost(19.93e-3, 3.85e-5, 6.27e-7, 0.0, 0.0)  # their fit below a batch of 95
DECODE_2 = StepCost(13.29e-3, 6.30e-5, 3.41e-7, 0.0, 0.0)
OPT_13B_TOKEN_BYTES = 2 * 40 * 5120 * 2
OPT_13B_POOL_TOKENS = 56_000  # of one A100 of 80 GB: 46 GB beside the weights
MAX_CONTEXT = 2048  # of OPT; their prompts are computed whole
SHAREGPT_PROMPT, SHAREGPT_OUTPUT = 755.5, 200.3  # mean tokens in their paper, as remembered: not looked up again
PUBLISHED_RATE, PUBLISHED_PLACEMENT = 1.5625, (2, 1)  # requests/s and GPU; GPUs of the prefill and of the decode worker


def distserve_model() -> CostModel:
    def costs(prefill: StepCost, decode: StepCost) -> Costs:
        link = LinkCost(100e9, 20e-6)
        return Costs("OPT-13B on A100", prefill, decode, link, OPT_13B_TOKEN_BYTES, MAX_CONTEXT, message_delay_s=0.0)

    return CostModel({1: costs(PREFILL_1, DECODE_1), 2: costs(PREFILL_2, DECODE_2)}, OPT_13B_POOL_TOKENS)


def sharegpt_like(num_requests: int, sigma: float) -> Load:
    """Log-normal lengths with their means: the data set itself is not here."""
    chance = random.Random("lengths like ShareGPT")
    jobs = []
    for _ in range(num_requests):
        prompt = SHAREGPT_PROMPT * chance.lognormvariate(-sigma * sigma / 2, sigma)
        output = SHAREGPT_OUTPUT * chance.lognormvariate(-sigma * sigma / 2, sigma)
        num_prompt = max(4, min(MAX_CONTEXT - 4, round(prompt)))
        jobs.append(Job(num_prompt, 0, max(2, min(MAX_CONTEXT - num_prompt, round(output)))))
    return Load("like ShareGPT", jobs, (), None)


def distserve(report: Report) -> None:
    rows = []
    for sigma in (0.6, 0.8, 1.0):
        search = Search(sharegpt_like(3000, sigma), distserve_model(), Slo(0.2, 0.1))
        rates = {
            (width, decode_width): statistics.median(
                search.goodput(Shape(1, width, MAX_CONTEXT, 1, decode_width), Scenario("", seed=seed)).rate
                for seed in range(5)
            )
            / (width + decode_width)
            for width in (1, 2)
            for decode_width in (1, 2)
        }
        best = max(rates, key=lambda placement: rates[placement])
        there = rates[PUBLISHED_PLACEMENT]
        placement = f"prefill {best[0]}, decode {best[1]}"
        rows.append((f"{sigma:g}", placement, f"{rates[best]:.2f}", f"{there:.2f}", relative(there, PUBLISHED_RATE)))
    report.add_table(
        ("sigma of the lengths", "best placement", "requests/s and GPU", "prefill 2, decode 1", "beside 1.5625"), rows
    )


# ---- Dynamo's guide, and vLLM's pull request


@dataclass(frozen=True, slots=True)
class GuidePoint:
    num_prompt_tokens: int
    throughput: float  # change by the split, as a share
    gap: float


GUIDE = (
    GuidePoint(1000, 0.0, -0.07), GuidePoint(2000, 0.03, -0.11), GuidePoint(4000, 0.14, -0.18),
    GuidePoint(8000, 0.22, -0.41),
)  # fmt: skip
ONE, TWO, SPLIT = Shape(1, 1, 8192), Shape(2, 1, 8192), Shape(1, 1, 8192, 1)


def closed_loop(fleet: Fleet, job: Job, concurrency: int, num_requests: int) -> tuple[float, float]:
    """Output tokens/s and the mean TPOT, with a new request for each that ends."""
    now, num_sent = 0.0, 0
    while num_sent < num_requests:
        fleet.advance(now)
        while num_sent - len(fleet.served) < concurrency and num_sent < num_requests:
            fleet.add(job, now)
            num_sent += 1
        now += TICK_S
    fleet.advance(float("inf"))
    lasts_s = max(one.ended_at for one in fleet.served)
    return num_requests * job.num_output_tokens / lasts_s, statistics.fmean(one.tpot_s or 0.0 for one in fleet.served)


def dynamo(report: Report) -> None:
    rows = []
    slow_link = EFA_GB * 1e9 / H100_8B.widths[1].link.bytes_per_s
    for point in GUIDE:
        job = Job(point.num_prompt_tokens, 0, 50)
        one, two, split = (
            closed_loop(H100_8B.fleet(shape, replace(AS_IT_IS, link=slow_link)), job, 10, 300)
            for shape in (ONE, TWO, SPLIT)
        )
        cells = [f"{relative(split[0], rival[0])}, {relative(split[1], rival[1])}" for rival in (one, two)]
        published = f"{point.throughput:+.0%}, {point.gap:+.0%}"
        rates = f"{one[0]:.0f}, {split[0]:.0f}"
        rows.append((f"{point.num_prompt_tokens:,}", published, *cells, rates))
    report.add_table(
        ("prompt", "published: throughput, ITL", "beside one undivided GPU", "beside two", "tokens/s of one, of 1P1D"),
        rows,
    )


def vllm(report: Report) -> None:
    tokens, tails = [], []
    for shape in (TWO, SPLIT):
        fleet = H100_8B.fleet(shape, AS_IT_IS)
        served = Load("random", [Job(8000, 0, 200)], (), None).run(fleet, 3.6, 200, 0)
        tokens.append(200 * 200 / max(one.ended_at for one in served))
        gaps = sorted(gap for worker in (*fleet.first, *fleet.decode) for gap in worker.gaps)
        tails.append(tail(gaps))
    report.add_table(
        ("", "published", "predicted"),
        [
            ("output tokens/s by 1P1D", "+40%", relative(tokens[1], tokens[0])),
            ("p99 ITL, times lower", 8, f"{tails[0] / tails[1]:.1f}"),
        ],
    )


def tail(gaps: Sequence[tuple[float, int]]) -> float:
    """The 99th percentile of rising (seconds, how many)."""
    rank = int(0.99 * sum(count for _, count in gaps))
    for seconds, count in gaps:
        rank -= count
        if rank < 0:
            return seconds
    return gaps[-1][0]


PARTS = {part.__name__: part for part in (machines, distserve, dynamo, vllm, splitwise, live)}


def main() -> None:
    report, parser = Report("advise"), parser_of(__doc__, tuple(PARTS))
    parser.set_defaults(parts=[name for name in PARTS if name != live.__name__])
    wanted = parser.parse_args().parts
    run_parts(report, {name: partial(part, report) for name, part in PARTS.items()}, wanted)


if __name__ == "__main__":
    main()
