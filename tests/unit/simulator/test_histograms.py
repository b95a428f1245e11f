"""A load from histograms: its means are those of the server, and its lengths those of the buckets."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.advice.histograms import Histogram, load_of_histograms
from simulator.replay.trace_rows import MAX_TOKENS

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
