"""The fit of a step cost: what it learns, from how many steps, and what cannot mislead it."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.cost.step_cost_fit import StepCostFit

CPU = StepCost(step_s=2.5e-2, sequence_s=2e-3, context_s=2e-6, token_s=4e-3, pair_s=1e-6)
GPU = StepCost(step_s=6e-3, sequence_s=3e-5, context_s=2e-8, token_s=2e-5, pair_s=1e-9)
MODELS = pytest.mark.parametrize("true", [CPU, GPU], ids=["cpu", "gpu"])


def decodes(count: int, context: int = 400) -> StepWork:
    return StepWork(count, count * context, 0, 0.0)


def chunk(num_tokens: int, start: int = 0, num_decodes: int = 0) -> StepWork:
    return StepWork(num_decodes, 400 * num_decodes, num_tokens, num_tokens * (start + num_tokens / 2))


def learned(true: StepCost, *works: StepWork, fit: StepCostFit | None = None) -> StepCostFit:
    fit = fit or StepCostFit()
    for work in works:
        fit.record(work, true.seconds(work))
    return fit


@MODELS
def test_a_known_cost_is_recovered_from_noisy_mixed_steps(true: StepCost) -> None:
    draw = random.Random(7)
    fit = StepCostFit()
    for _ in range(400):
        work = _some_work(draw)
        fit.record(work, true.seconds(work) * max(draw.gauss(1.0, 0.08), 0.5))
    for _ in range(200):
        work = _some_work(draw)
        assert fit.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.05)


def _some_work(draw: random.Random) -> StepWork:
    num_decodes = draw.choice([0, draw.randint(1, 64)])
    num_tokens = draw.choice([0, draw.randint(16, 512)]) if num_decodes else draw.randint(16, 512)
    start = draw.randint(0, 4000)
    context = num_decodes * draw.randint(20, 2000)
    return StepWork(num_decodes, context, num_tokens, num_tokens * (start + num_tokens / 2))


@MODELS
def test_after_a_few_prompts_prompts_of_other_lengths_are_priced_right(true: StepCost) -> None:
    fit = learned(true, *[chunk(512, start) for start in range(0, 2048, 512)], chunk(70), chunk(300), chunk(20))
    for work in (chunk(40), chunk(150), chunk(450), chunk(200, 512), chunk(512, 3072)):
        assert fit.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.1)


def test_if_only_decodes_were_seen_prompts_keep_the_proportions_of_the_prior() -> None:
    fifth = StepCost(*(value / 5 for value in astuple(PRIOR)))
    fit = learned(fifth, *[decodes(4, 200 + step) for step in range(50)])
    assert fit.cost.prompt_seconds(700) == pytest.approx(fifth.prompt_seconds(700), rel=0.02)
    assert fit.cost.seconds(decodes(8)) == pytest.approx(fifth.seconds(decodes(8)), rel=0.02)


def test_if_only_one_chunk_size_was_seen_no_coefficient_runs_away() -> None:
    true = StepCost(*(value * 3 for value in astuple(PRIOR)))
    fit = learned(true, *[chunk(64)] * 50)
    for work in (chunk(16), chunk(64), chunk(512), decodes(8)):
        assert fit.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.05)


def test_a_thousand_decodes_do_not_make_it_forget_the_price_of_prompts() -> None:
    fit = learned(GPU, chunk(512), chunk(512, 512), chunk(100), *[decodes(4, step) for step in range(100, 1100)])
    assert fit.cost.prompt_seconds(800) == pytest.approx(GPU.prompt_seconds(800), rel=0.1)


@MODELS
@pytest.mark.parametrize("factor", [10.0, 1000.0, 0.01])
@pytest.mark.parametrize("work", [decodes(4), chunk(512), chunk(64, 512, num_decodes=4)])
def test_an_outlier_moves_no_price_by_more_than_a_few_percent(true: StepCost, factor: float, work: StepWork) -> None:
    seen = [decodes(4), chunk(512), chunk(512, 512), chunk(64, 512, num_decodes=4)]
    fit = learned(true, *seen * 30)
    before = [fit.cost.seconds(each) for each in seen]
    fit.record(work, factor * true.seconds(work))
    for each, seconds in zip(seen, before, strict=True):
        assert fit.cost.seconds(each) == pytest.approx(seconds, rel=0.04)


def test_an_outlier_among_the_first_steps_is_soon_forgotten() -> None:
    fit = StepCostFit()
    fit.record(decodes(4), 50 * CPU.seconds(decodes(4)))  # a cold start
    learned(CPU, *[decodes(4)] * 10, fit=fit)
    assert fit.cost.seconds(decodes(4)) == pytest.approx(CPU.seconds(decodes(4)), rel=0.1)


@pytest.mark.parametrize("factor", [3.0, 1 / 3.0])
def test_a_lasting_change_is_followed_within_some_tens_of_steps(factor: float) -> None:
    seen = [decodes(4), decodes(4, 410), chunk(64, 512, num_decodes=4)]
    fit = learned(CPU, *seen * 60)
    now = StepCost(*(value * factor for value in astuple(CPU)))
    learned(now, *seen * 10, fit=fit)
    for work in seen:
        assert fit.cost.seconds(work) == pytest.approx(now.seconds(work), rel=0.15)
    learned(now, *seen * 20, fit=fit)
    for work in seen:
        assert fit.cost.seconds(work) == pytest.approx(now.seconds(work), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_scatter_widely_do_not_swing_the_cost_of_a_decode(seed: int) -> None:
    """On a busy machine, with few batch sizes: the proportions of the prior hold what the steps do not tell apart."""
    draw, fit, seen = random.Random(seed), StepCostFit(), []
    for step in range(300):
        work = decodes(draw.choice([1, 2, 3, 4]), 300)
        fit.record(work, CPU.seconds(work) * draw.lognormvariate(0.0, 0.6))
        if step >= 50:
            seen.append(fit.cost.sequence_s + 300 * fit.cost.context_s)
    assert max(seen) < 3 * (CPU.sequence_s + 300 * CPU.context_s)


@MODELS
@pytest.mark.parametrize("seconds", [1e-4, 10.0])
def test_one_wrong_measurement_of_a_new_kind_of_step_moves_no_price_by_half(true: StepCost, seconds: float) -> None:
    """A new bin has nothing to compare a step with."""
    fit = learned(true, *[decodes(count, context) for count in (1, 4, 16) for context in (100, 900)] * 5, chunk(64))
    for _ in range(2):
        fit.record(chunk(512), seconds)
    for work in (decodes(1), decodes(16), decodes(8, 2000)):
        assert fit.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.5)
