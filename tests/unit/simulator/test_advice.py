"""The coarse workers keep the laws of a fleet, and the verdict says no more than the model knows."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cost.step_cost import StepCost
from simulator.advice import goodput
from simulator.advice.advice import MAX_GPUS, Advice, Contest, Verdict, advise, group_of
from simulator.advice.goodput import AdviceRefused, Load, Search, Slo, load_of
from simulator.advice.histograms import Histogram, load_of_histograms
from simulator.advice.pools import MAX_RUNNING, Fleet, Handoff, Job, Served, Worker, WorkerKind
from simulator.advice.shapes import CostModel, Scenario, Shape, scaled_widths, split_shapes, undivided_shapes
from simulator.calibration.costs import BUILT_IN, built_in_widths
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import percentile, rising
from simulator.replay.trace_rows import MAX_TOKENS
from simulator.replay.workloads import Synthetic, synthetic

COST = StepCost(step_s=0.01, sequence_s=1e-4, context_s=1e-7, token_s=1e-4, pair_s=1e-9)
MODEL = CostModel(built_in_widths("h100-8b"), 400_000)
NOMINAL = Scenario("as modelled")

jobs_of_any_length = st.builds(
    lambda new, cached, output: Job(new + cached, cached, output),
    st.integers(1, 3000), st.integers(0, 500), st.integers(1, 300),
)  # fmt: skip
gaps_s = st.integers(0, 2000).map(lambda count: count / 4096)  # exact in any sum
arrivals = st.lists(st.tuples(gaps_s, jobs_of_any_length), min_size=1, max_size=30)


def fleet(num_first: int, num_decode: int = 0, pool_tokens: int = 20_000, budget: int = 1024) -> Fleet:
    kind = WorkerKind(1, COST, budget, pool_tokens, overlap=0.0)
    handoff = Handoff(1e9, 1e-4, 1000)
    return Fleet([Worker(kind) for _ in range(num_first)], [Worker(kind) for _ in range(num_decode)], handoff)


def timed(gaps: list[tuple[float, Job]]) -> tuple[list[Job], list[float]]:
    at, times = 0.0, []
    for gap, _ in gaps:
        times.append(at := at + gap)
    return [job for _, job in gaps], times


def load(prompt: int, output: int, num_requests: int = 1000, spread: float = 0.2) -> Load:
    config = Synthetic(num_requests, prompt_tokens=prompt, output_tokens=output, spread=spread)
    return load_of(synthetic(config), is_random=True)


# ---- coarse workers


@given(arrivals, st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=60)
def test_every_request_is_served_once_and_no_faster_than_its_work(
    gaps: list[tuple[float, Job]], num_first: int, num_decode: int
) -> None:
    jobs, times = timed(gaps)  # each has at most 3,799 tokens
    used = fleet(num_first, num_decode, pool_tokens=5000)
    served = used.run(jobs, times)
    assert sorted(one.arrived_at for one in served) == sorted(times)
    assert sorted(one.num_output_tokens for one in served) == sorted(job.num_output_tokens for job in jobs)
    least_s = min(COST.prompt_seconds(job.num_prompt_tokens - job.num_cached_tokens, 0) for job in jobs)
    for one in served:
        assert one.ttft_s >= least_s
        assert one.tpot_s is None or one.tpot_s >= COST.step_s
    for worker in (*used.first, *used.decode):
        assert worker.most_reserved <= 5000


@pytest.mark.parametrize(
    ("num_decode", "job", "is_served"),
    [
        (0, Job(60, 0, 41), True),
        (0, Job(60, 0, 42), False),
        (1, Job(100, 0, 1), True),
        (1, Job(101, 0, 1), False),
        (1, Job(60, 0, 41), True),
        (1, Job(60, 0, 42), False),
        (1, Job(101, 0, 2), False),
    ],
)
def test_a_job_larger_than_its_pool_gets_no_token(num_decode: int, job: Job, is_served: bool) -> None:
    one, other = fleet(1, num_decode, pool_tokens=100).run([job, Job(10, 0, 2)], [0.0, 9.0])
    assert math.isfinite(one.ttft_s) is is_served
    assert math.isfinite(other.ttft_s)


def test_an_answer_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_WORK", 100_000)
    with pytest.raises(AdviceRefused, match="the answer needs more than 100,000 passes"):
        advise(load(500, 50), MODEL, Slo(1.0, 0.1), 2)


def test_a_run_of_too_many_steps_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_WORK", 1_000_000)
    search = Search(load(5000, 50, num_requests=100, spread=0.0), MODEL, Slo(1.0, 0.1))
    with pytest.raises(AdviceRefused, match="the answer needs more than"):
        search.trial(Shape(1, 1, max_step_tokens=4), NOMINAL, 1.0)


def test_runs_of_long_prompts_are_shorter() -> None:
    model = replace(MODEL, pool_tokens=2_000_000)
    search = Search(load(50_000, 50, num_requests=100, spread=0.0), model, Slo(600.0, 10.0))
    search.trial(Shape(8, 1, max_step_tokens=512), NOMINAL, 100.0)
    assert search.work < 500_000, "2,000 requests of 98 chunks, not 10,000"


def test_a_load_that_one_gpu_cannot_hold_goes_to_wide_workers() -> None:
    large = Load("large", [Job(6000, 0, 20)] * 100, (), 1.0)
    advice = advise(large, replace(MODEL, pool_tokens=4000), Slo(10.0, 1.0), 4)
    assert {one.shape.width for one in advice.candidates if one.goodput and not one.is_bound} <= {2, 4}
    assert any(one.goodput for one in advice.candidates)
    assert advice.best_of(is_split=True).shape.decode_width > 1  # type: ignore[union-attr]


@given(arrivals, st.integers(0, 1))
@settings(max_examples=60)
def test_a_fleet_that_has_run_empty_is_as_a_new_one(gaps: list[tuple[float, Job]], num_decode: int) -> None:
    jobs, times = timed(gaps)
    used = fleet(1, num_decode)
    before = list(used.run(jobs, times))
    assert all(worker.load_s(at=worker.now) == 0.0 for worker in (*used.first, *used.decode))
    used.served.clear()
    after = used.run(jobs, [at + 1024.0 for at in times])
    assert ttfts_of(after) == pytest.approx(ttfts_of(before), abs=1e-6)
    ends = [one.ended_at + 1024.0 for one in before]
    assert sorted(one.ended_at for one in after) == pytest.approx(sorted(ends), abs=1e-6)


def ttfts_of(served: list[Served]) -> list[float]:
    return sorted(one.ttft_s for one in served)


def test_a_prompt_that_is_computed_later_does_not_hold_up_an_earlier_one() -> None:
    served = fleet(2, 1).run([Job(1000, 0, 2), Job(10, 0, 2)], [0.0, 0.01])
    assert served[1].tpot_s == pytest.approx(0.0103, rel=0.05)


@given(arrivals, st.integers(0, 2), st.floats(0.003, 0.2))
@settings(max_examples=60)
def test_a_stretch_of_steps_takes_as_long_as_its_steps(
    gaps: list[tuple[float, Job]], num_decode: int, tick_s: float
) -> None:
    """Looking at the fleet more often changes nothing."""
    jobs, times = timed(gaps)
    at_once = fleet(2, num_decode).run(jobs, times)
    ticking = fleet(2, num_decode)
    now = 0.0
    for job, at in zip(jobs, times, strict=True):
        while (now := now + tick_s) < at:
            ticking.advance(now)
        now = at
        ticking.add(job, at)
    for _ in range(100):
        now += tick_s
        ticking.advance(now)
    in_ticks = ticking.run([], [])
    assert ttfts_of(in_ticks) == pytest.approx(ttfts_of(at_once), abs=1e-6)
    ends = sorted(one.ended_at for one in at_once)
    assert sorted(one.ended_at for one in in_ticks) == pytest.approx(ends, abs=1e-6)


def test_a_small_budget_cuts_prompts_and_lets_decodes_pass() -> None:
    jobs, times = [Job(100, 0, 200), Job(8000, 0, 2)], [0.0, 0.5]
    whole, cut = (fleet(1, budget=budget).run(jobs, times) for budget in (8192, 512))
    worst = [max(gap for gap, _ in gaps) for gaps in (gaps_of(jobs, times, 8192), gaps_of(jobs, times, 512))]
    assert worst[0] > 0.8
    assert worst[1] < 0.1
    assert cut[1].ttft_s > whole[1].ttft_s


def gaps_of(jobs: list[Job], times: list[float], budget: int) -> list[tuple[float, int]]:
    used = fleet(1, budget=budget)
    used.run(jobs, times)
    return used.first[0].gaps


def test_at_most_so_many_sequences_run_and_the_others_wait() -> None:
    served = fleet(1, pool_tokens=10**9).run([Job(1, 0, 100)] * (MAX_RUNNING + 1), [0.0] * (MAX_RUNNING + 1))
    assert sum(one.ttft_s > 1.0 for one in served) == 1


def test_the_kv_of_a_long_prompt_delays_the_second_token() -> None:
    [one] = fleet(1, 1).run([Job(10_000, 0, 2)], [0.0])
    assert one.tpot_s == pytest.approx(10_000 * 1000 / 1e9 + 1e-4 + COST.step_s + COST.sequence_s + 1e-3, rel=0.01)


def test_decode_workers_hold_equal_shares_of_the_kv() -> None:
    used = fleet(4, num_decode=4, pool_tokens=40_000)
    used.run([Job(10, 0, 3000)] * 40, [0.0037 * number for number in range(40)])
    assert {worker.most_reserved for worker in used.decode} == {10 * (10 + 2999)}


def test_the_coarse_workers_are_near_the_production_machines() -> None:
    workload = synthetic(Synthetic(200, prompt_tokens=2000, output_tokens=100))
    config = ReplayConfig(num_prefill=2, num_decode=2, rate=16.0)
    replay = Replay(workload, replace(config, router=replace(config.router, local_prefill="never")))
    jobs = [Job(one.num_tokens, 0, one.num_output_tokens) for one in replay.trace]
    coarse = MODEL.fleet(Shape(2, 1, 8192, 2), NOMINAL).run(jobs, [one.arrives_at for one in replay.trace])
    exact = replay.run()
    assert percentile(rising(one.tpot_s for one in coarse), 50) == pytest.approx(percentile(exact.tpot_s, 50), rel=0.03)
    assert percentile(rising(one.ttft_s for one in coarse), 50) == pytest.approx(percentile(exact.ttft_s, 50), rel=0.06)


# ---- shapes


@given(st.integers(2, 16))
def test_every_shape_has_all_gpus(num_gpus: int) -> None:
    mean = Job(2000, 0, 200)
    undivided = list(undivided_shapes(num_gpus, MODEL, mean))
    splits = list(split_shapes(num_gpus, MODEL, mean, 0.05))
    assert undivided
    assert splits
    for shape in (*undivided, *splits):
        assert shape.num_first * shape.width + shape.num_decode * shape.decode_width == num_gpus
    if num_gpus % 8 == 0:
        assert any(shape.width == 8 for shape in undivided), "the rival of two wide pools"


def test_wider_workers_of_a_calibrated_model_gain_as_those_of_the_known_one() -> None:
    known = built_in_widths("h100-8b")
    assert scaled_widths(known[1], known)[2].decode.step_s == pytest.approx(known[2].decode.step_s)
    twice = replace(known[1], decode=replace(known[1].decode, step_s=2 * known[1].decode.step_s))
    assert scaled_widths(twice, known)[4].decode.step_s == pytest.approx(2 * known[4].decode.step_s)


def test_the_built_in_costs_of_a_name_have_every_width() -> None:
    assert list(built_in_widths("h100-8b")) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match=r"no costs of a100-8b, only of h100-8b"):
        built_in_widths("a100-8b")
    assert BUILT_IN["h100-8b-tp8"].link.bytes_per_s == 8 * BUILT_IN["h100-8b"].link.bytes_per_s


# ---- goodput


def test_goodput_is_the_edge_of_the_limits() -> None:
    search = Search(load(2000, 100), MODEL, Slo(1.0, 0.03))
    shape = Shape(2, 1, 8192)
    found = search.goodput(shape, NOMINAL).rate
    assert search.trial(shape, NOMINAL, 0.9 * found).attainment >= 0.9
    assert search.trial(shape, NOMINAL, 1.15 * found).attainment < 0.9
    assert search.goodput(Shape(4, 1, 8192), NOMINAL).rate > 1.8 * found


def test_limits_that_nothing_keeps_give_no_goodput() -> None:
    assert Search(load(2000, 100), MODEL, Slo(1.0, 0.001)).goodput(Shape(2, 1, 8192), NOMINAL).rate == 0.0


def test_the_gaps_of_a_log_keep_their_bursts_at_any_rate() -> None:
    chance = random.Random(3)
    times = sorted(chance.choice((0.0, 50.0)) + chance.random() for _ in range(200))
    jobs = [Job(10, 0, 2)] * 200
    gaps = [0.25, *(b - a for a, b in pairwise(times))]
    served = Load("bursts", jobs, gaps, 4.0).run(fleet(1), 20.0, 200, seed=0)
    starts = sorted(one.arrived_at for one in served)
    assert starts[-1] == pytest.approx(10.0, rel=0.01)
    assert max(b - a for a, b in pairwise(starts)) > 2.0


# ---- verdicts


def advice_of(*pairs: tuple[float, float]) -> Advice:
    return Advice((), tuple(Contest(f"scenario {number}", *pair) for number, pair in enumerate(pairs)), 1, 0)


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(10.0, 12.0), (10.0, 11.0)], Verdict.SPLIT),
        ([(10.0, 12.0), (10.0, 10.4)], Verdict.UNDECIDED),  # gains too little in one scenario
        ([(10.0, 12.0), (10.0, 9.0)], Verdict.UNDECIDED),
        ([(10.0, 10.4), (10.0, 8.0)], Verdict.DO_NOT_SPLIT),
        ([(0.0, 3.0), (0.0, 2.0)], Verdict.SPLIT),
        ([(0.0, 3.0), (0.0, 0.0)], Verdict.UNDECIDED),
        ([(0.0, 0.0), (0.0, 0.0)], Verdict.NEITHER),
    ],
)  # fmt: skip
def test_a_verdict_holds_in_every_scenario_or_is_undecided(pairs: list[tuple[float, float]], verdict: Verdict) -> None:
    assert advice_of(*pairs).verdict is verdict


def test_long_prompts_and_tight_gaps_are_split() -> None:
    advice = advise(load(16_000, 200), MODEL, Slo(2.0, 0.009), 4)
    assert advice.verdict is Verdict.SPLIT
    for is_split in (False, True):
        best: Any = advice.best_of(is_split=is_split)
        assert best.low <= best.goodput <= best.high


@pytest.mark.parametrize(("num_gpus", "group"), [(2, 2), (13, 13), (16, 16), (48, 16), (36, 12), (1000, 10)])
def test_many_gpus_are_asked_as_groups(num_gpus: int, group: int) -> None:
    assert group_of(num_gpus) == group


def test_a_queue_that_grows_without_end_is_not_hidden_by_loose_limits() -> None:
    """A decode worker that runs 256 sequences cannot end 300 requests/s, however long each may take."""
    search = Search(load(200, 200), MODEL, Slo(5.0, 0.2))
    assert search.goodput(Shape(1, 1, 8192, 1), NOMINAL).rate < 160.0


@pytest.mark.parametrize(
    ("num_requests", "num_gpus", "message"),
    [
        (99, 8, "99 requests, at least 100 are needed"),
        (100, 1, r"must be in \[2, 1024\], is 1"),
        (100, MAX_GPUS + 1, r"must be in \[2, 1024\], is 1025"),
        (100, 34, "34 has no such divisor"),
    ],
)  # fmt: skip
def test_questions_without_an_honest_answer_are_refused(num_requests: int, num_gpus: int, message: str) -> None:
    with pytest.raises(AdviceRefused, match=message):
        advise(load(500, 20, num_requests), MODEL, Slo(1.0, 0.05), num_gpus)


def test_a_request_that_fits_into_no_worker_is_refused() -> None:
    with pytest.raises(AdviceRefused, match=r"a request of [\d,]+ tokens does not fit .* 2 GPUs with 400 tokens"):
        advise(load(500, 20, 100), replace(MODEL, pool_tokens=200), Slo(1.0, 0.05), 2)


def test_a_job_needs_a_token_to_compute_and_one_to_return() -> None:
    for lengths in ((0, 0, 1), (5, 5, 1), (5, 0, 0), (5, -1, 1)):
        with pytest.raises(ValueError, match="not the lengths"):
            Job(*lengths)


def test_a_request_with_one_token_has_no_gap() -> None:
    assert Served(0.0, 1.0, 1, 0.5, None).within(0.5, 0.001)
    assert not Served(0.0, 1.0, 2, 0.5, 0.002).within(0.5, 0.001)


# ---- A load from histograms: its means are those of the server, and its lengths those of the buckets.

buckets = st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(0, 1000)), min_size=1, max_size=12)


@given(buckets, st.booleans(), st.floats(0.5, 1e6), st.integers(1, 300))
def test_lengths_are_whole_rising_and_of_the_known_mean(
    found: list[tuple[float, int]], is_open: bool, mean: float, num: int
) -> None:
    bounds, counts = list(accumulate(width for width, _ in found)), list(accumulate(count for _, count in found))
    if is_open:
        bounds[1:], counts[1:] = [*bounds[1:], math.inf], [*counts[1:], counts[-1] + 5]
    if not counts[-1]:
        counts[-1] = 1
    lengths = Histogram("h", bounds, counts, mean * counts[-1]).lengths(num)
    assert len(lengths) == num
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] <= lengths[-1] <= MAX_TOKENS
    if lengths[-1] < MAX_TOKENS:
        assert mean - 0.51 <= sum(lengths) / num <= mean + 1.0


@given(
    st.lists(st.tuples(st.floats(0.0), st.floats(0.0)), min_size=1, max_size=4).map(sorted),
    st.floats(0.0) | st.floats(0.5, 1e3),
    st.integers(1, 50),
)
def test_what_is_a_histogram_has_lengths(found: list[tuple[float, float]], mean: float, num: int) -> None:
    """From the smallest to the largest floats, and infinity."""
    bounds, counts = [bound for bound, _ in found], sorted(count for _, count in found)
    try:
        histogram = Histogram("h", bounds, counts, mean * counts[-1])
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    assert refused.startswith("h ") or all(1 <= length <= MAX_TOKENS for length in histogram.lengths(num))


def test_a_bucket_has_its_share_of_the_requests() -> None:
    lengths = Histogram("h", (100.0, 200.0, math.inf), (10.0, 40.0, 50.0), 50 * 140.0).lengths(50)
    shown = [sum(low < length <= high for length in lengths) for low, high in ((0, 100), (100, 199), (199, 201))]
    assert shown == [10, 30, 10]


@pytest.mark.parametrize(
    ("bounds", "counts", "total", "message"),
    [
        ((), (), 1.0, "h is no histogram"),
        ((1.0, 1.0), (1.0, 2.0), 1.0, "h is no histogram"),
        ((0.0, 1.0), (1.0, 2.0), 1.0, "h is no histogram"),
        ((math.nan, 1.0), (1.0, 2.0), 1.0, "h is no histogram"),
        ((1.0, 2.0), (2.0, 1.0), 1.0, "h is no histogram"),
        ((1.0, 2.0), (2.0,), 1.0, "h is no histogram"),
        ((1.0, 2.0), (0.0, 0.0), 1.0, "h has 0 requests with 1 tokens"),
        ((1.0, 2.0), (0.0, 5.0), math.inf, "h has 5 requests with inf tokens"),
        ((1.0, 2.0), (0.0, 500.0), 0.0, r"h has 500 requests with 0 tokens: their mean must be in \[0.5, 4,000,000\]"),
        ((1.0, 1e308), (1.0, 2.0), 9.0, "h must have bounds in"),
        ((1e-9, 2.0), (1.0, 2.0), 9.0, "h must have bounds in"),
        ((1.0, 2.0), (1.0, 1e300), 9.0, "h must have bounds in"),
        ((math.inf,), (5.0,), 9.0, "h has no finite bound"),
    ],
)
def test_what_is_no_histogram_is_refused(
    bounds: tuple[float, ...], counts: tuple[float, ...], total: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Histogram("h", bounds, counts, total)


@pytest.mark.parametrize(("hit_share", "used"), [(0.25, 0.25), (-1.0, 0.0), (7.0, 1.0)])
def test_each_prompt_has_the_share_of_hits_but_its_last_token(hit_share: float, used: float) -> None:
    prompts, outputs = Histogram("p", (400.0,), (120.0,), 120 * 400.0), Histogram("o", (9.0, 90.0), (60.0, 120.0), 3e3)
    load = load_of_histograms("here", prompts, outputs, hit_share, 60.0, 500)
    assert load.rate == 2.0
    for job in load.jobs:
        assert job.num_cached_tokens == min(job.num_prompt_tokens - 1, int(job.num_prompt_tokens * used))
    first = [job.num_output_tokens for job in load.jobs[:250]]
    assert len(set(first)) > 50, "outputs follow prompts"
