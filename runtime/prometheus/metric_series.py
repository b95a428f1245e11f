"""The numbers behind counters and histograms: plain lists and dicts, because every token writes them.

One thread writes. The thread of a scrape copies what it finds: it may miss the newest values, and no value is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate


class Buckets:
    """The values of one series of a histogram. `bounds` are the upper, inclusive ends of its buckets, rising."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`counts`: values in each bucket, and one more entry for the values above the last bound. May be shorter."""
        self.bounds = bounds
        self.counts = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
        self.total = total

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Buckets) -> None:
        """Add the values of a histogram with the same bounds."""
        assert other.bounds == self.bounds
        for place, count in enumerate(list(other.counts)):
            self.counts[place] += count
        self.total += other.total

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it), as the text format of Prometheus has them."""
        return list(zip(_names(self.bounds), map(float, accumulate(list(self.counts))), strict=True))


@cache
def _names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(repr(float(bound)) for bound in bounds), "+Inf")


Value = float | Buckets
Labels = tuple[str, ...]  # values, in the order of the names


class Series:
    """Every series of one recorded metric, by its labels. A metric without labels begins at 0."""

    __slots__ = ("bounds", "names", "values")

    def __init__(self, names: tuple[str, ...], bounds: tuple[float, ...] | None) -> None:
        """`names` of the labels. `bounds`: of a histogram; None for a counter."""
        self.names = names
        self.bounds = bounds
        self.values: dict[Labels, Value] = {}
        if not names:
            self.values[()] = 0.0 if bounds is None else Buckets(bounds)

    def add(self, labels: Labels, value: float) -> None:
        if self.bounds is None:
            known = self.values.get(labels, 0.0)
            assert not isinstance(known, Buckets)
            self.values[labels] = known + value
        else:
            self.buckets(labels).observe(value)

    def buckets(self, labels: Labels) -> Buckets:
        """Of a histogram. The caller may keep them and observe values itself."""
        assert self.bounds is not None, "a counter has no buckets"
        known = self.values.get(labels)
        if known is None:
            known = self.values[labels] = Buckets(self.bounds)
        assert isinstance(known, Buckets)
        return known

    def snapshot(self) -> list[tuple[Labels, Value]]:
        return list(self.values.copy().items())  # one call copies, which no other thread can interrupt
