"""Histograms and counters: values in buckets, and series by label."""

from __future__ import annotations

import gc
import itertools

from runtime.prometheus.metric_series import Buckets, Series


def test_a_bucket_includes_its_upper_end() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.observe(value)
    assert buckets.counts == [2, 2, 1]
    assert buckets.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert (buckets.total, buckets.num_values) == (14.0, 5)


def test_counts_without_their_zeros_at_the_end_are_complete() -> None:
    assert Buckets((1.0, 2.0), (3,), 1.5).cumulative() == [("1.0", 3), ("2.0", 3), ("+Inf", 3)]


def test_adding_a_histogram_changes_only_the_sum() -> None:
    one, other = Buckets((1.0,), (1, 2), 5.0), Buckets((1.0,), (3,), 0.5)
    one.add(other)
    assert (one.counts, one.total) == ([4, 2], 5.5)
    assert (other.counts, other.total) == ([3, 0], 0.5)


def test_a_series_without_labels_is_there_from_the_start() -> None:
    assert Series((), None).snapshot() == [((), 0.0)]
    ((labels, empty),) = Series((), (1.0,)).snapshot()
    assert isinstance(empty, Buckets)
    assert (labels, empty.num_values) == ((), 0)


def test_each_combination_of_labels_is_counted_apart() -> None:
    series = Series(("tenant",), None)
    for labels in (("a",), ("b",), ("a",)):
        series.add(labels, 2.0)
    assert dict(series.snapshot()) == {("a",): 4.0, ("b",): 2.0}


def test_a_scrape_copies_series_while_others_are_added() -> None:
    """A collection of garbage, which the tuples of the copy can begin, may let another thread run."""
    series, names = Series(("a",), None), map(str, itertools.count())
    for name in itertools.islice(names, 50):
        series.add((name,), 1)

    def add(*_: object) -> None:
        series.add((next(names),), 1)

    thresholds = gc.get_threshold()
    gc.callbacks.append(add)
    try:
        gc.set_threshold(1)
        snapshot = series.snapshot()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(add)
    assert len(series.values) > 50, "a collection ran meanwhile"
    assert {f"{number}" for number in range(50)} <= {labels[0] for labels, _ in snapshot}
