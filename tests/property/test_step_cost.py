"""A fitted cost stays a cost: finite, never negative, and close to what was measured, whatever the steps were."""

from __future__ import annotations

import math
from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.cost.step_cost_fit import StepCostFit

coefficients = st.floats(1e-10, 1.0)
costs = st.builds(StepCost, coefficients, coefficients, coefficients, coefficients, coefficients)
works = st.builds(
    lambda count, context, num_tokens, start: StepWork(
        count, count * context, num_tokens, num_tokens * (start + num_tokens / 2)
    ),
    st.integers(0, 1024),
    st.integers(1, 200_000),
    st.sampled_from([0, 0, 16, 200, 512, 8192]),
    st.integers(0, 200_000),
)


@given(st.lists(st.tuples(works, st.floats(0.0, 1e4)), max_size=60))
def test_no_coefficient_is_negative_or_infinite(steps: list[tuple[StepWork, float]]) -> None:
    fit = StepCostFit()
    for work, seconds in steps:
        fit.record(work, seconds)
        assert all(value >= 0.0 and math.isfinite(value) for value in astuple(fit.cost))


@given(works, st.floats(1e-4, 1e3))
def test_a_step_seen_again_and_again_is_predicted(work: StepWork, seconds: float) -> None:
    fit = StepCostFit()
    for _ in range(40):
        fit.record(work, seconds)
    assert abs(fit.cost.seconds(work) / seconds - 1.0) < 0.05


@given(costs, st.floats(0.0, 10.0), st.integers(0, 100_000))
def test_tokens_within_is_the_inverse_of_prompt_seconds(cost: StepCost, seconds: float, start: int) -> None:
    num_tokens = cost.tokens_within(seconds, start)
    assert num_tokens >= 0
    if num_tokens < 2**31:
        slack = 1e-9 + 1e-6 * seconds
        assert cost.prompt_seconds(num_tokens, start) <= seconds + slack or num_tokens == 0
        assert cost.prompt_seconds(num_tokens + 1, start) >= seconds - slack


def test_tokens_within_is_bounded_for_a_cost_of_nothing() -> None:
    assert StepCost(PRIOR.step_s, 0.0, 0.0, 0.0, 0.0).tokens_within(1.0) == 2**31
