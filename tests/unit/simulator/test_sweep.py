"""A grid of simulations: every combination, the front, and the highest rate of each shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.sweep import Axis, Point, grid, highest_rates, pareto_front


def point(num_prefill: int, num_decode: int, attainment: float, rate: float = 2.0) -> Point:
    return Point(num_prefill, num_decode, rate, attainment, goodput=attainment * rate)


def test_a_grid_has_every_combination() -> None:
    assert grid([Axis("prefill", (1, 2)), Axis("rate", (3.0, 4.0))]) == [
        {"prefill": 1, "rate": 3.0},
        {"prefill": 1, "rate": 4.0},
        {"prefill": 2, "rate": 3.0},
        {"prefill": 2, "rate": 4.0},
    ]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6).map(float)), min_size=1, max_size=12))
def test_the_front_is_what_no_pair_beats(values: list[tuple[int, float]]) -> None:
    front = pareto_front(values)
    for index, (workers, value) in enumerate(values):
        is_beaten = any(
            (w <= workers and v > value) or (w < workers and v >= value) for w, v in values
        )  # fmt: skip
        twin_on_front = any(values[other] == (workers, value) for other in front)
        assert twin_on_front != is_beaten
        assert not (index in front and is_beaten)
    assert [values[index][0] for index in front] == sorted({values[index][0] for index in front})


def test_each_shape_has_its_own_highest_rate() -> None:
    points = [point(1, 1, 1.0, 1.0), point(1, 1, 0.8, 2.0), point(2, 2, 1.0, 1.0), point(2, 2, 1.0, 2.0)]
    assert highest_rates(points) == {(1, 1): pytest.approx(1.5), (2, 2): 2.0}
