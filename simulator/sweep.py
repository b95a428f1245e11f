"""A grid of simulations, and what it answers: how many workers of each role, and the highest rate.

    prefill=1..16 decode=1..16        every pair of sizes of the two pools
    rate=0.5..8:0.5                   rates in steps of 0.5 requests/s
    prefill=1,2,4,8 rate=1..8         values by name, and both kinds of axis together
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

WHOLE = ("prefill", "decode")  # axes of whole numbers
NAMES = (*WHOLE, "rate")
MAX_POINTS = 4096
MAX_WORKERS = 4096  # of each role
TARGET = 0.9  # attainment


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    values: tuple[float, ...]  # rising; whole numbers for the axes in WHOLE


def parse_sweep(words: Sequence[str]) -> tuple[Axis, ...]:
    """Axes from words such as `prefill=1..16`. Raises `ValueError` that names the word."""
    axes = tuple(_parse_axis(word) for word in words)
    names = [axis.name for axis in axes]
    if not axes:
        raise ValueError("no axis: give values such as prefill=1..16")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{repeated} has two axes")
    if (count := math.prod(len(axis.values) for axis in axes)) > MAX_POINTS:
        raise ValueError(f"the axes make {count} simulations, at most {MAX_POINTS} are allowed")
    return axes


def _parse_axis(word: str) -> Axis:
    name, equals, text = word.partition("=")
    if not equals or name not in NAMES:
        raise ValueError(f"{word!r} is no axis: write one of {', '.join(NAMES)}, then =, then values such as 1..16")
    try:
        values = sorted({value for part in text.split(",") for value in _parse_range(part)})
    except InvalidOperation as error:
        raise ValueError(f"{word!r}: write values such as 1..16, 0.5..8:0.5 or 1,2,4") from error
    except ValueError as error:
        raise ValueError(f"{word!r}: {error}") from error
    least = 0 if name == "prefill" else 1 if name == "decode" else Decimal("0.000001")
    if values[0] < least or (name in WHOLE and values[-1] > MAX_WORKERS):
        limit = f" and at most {MAX_WORKERS}" if name in WHOLE else ""
        raise ValueError(f"{word!r}: {name} must be at least {least}{limit}")
    if name in WHOLE and any(value % 1 for value in values):
        raise ValueError(f"{word!r}: {name} takes whole numbers")
    return Axis(name, tuple(int(value) if name in WHOLE else float(value) for value in values))


def _parse_range(text: str) -> list[Decimal]:
    """`first..last:step`, with step 1 if it is missing, or one value. Decimals, so that 0.1 x 3 is 0.3."""
    bounds, _, step_text = text.partition(":")
    first_text, dots, last_text = bounds.partition("..")
    if step_text and not dots:
        raise InvalidOperation
    first = Decimal(first_text)
    last, step = Decimal(last_text) if dots else first, Decimal(step_text or 1)
    if not all(value.is_finite() for value in (first, last, step)):
        raise ValueError("values must be finite")
    if step <= 0 or last < first:
        raise ValueError("the step must be positive, and the last value not below the first")
    if (last - first) / step >= MAX_POINTS:
        raise ValueError(f"more than {MAX_POINTS} values")
    return [first + step * index for index in range(int((last - first) / step) + 1)]


def grid(axes: Sequence[Axis]) -> list[dict[str, float]]:
    """Every combination of values, the last axis fastest."""
    return [
        dict(zip((axis.name for axis in axes), values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation of a grid. `goodput`: requests/s inside the SLO."""

    num_prefill: int
    num_decode: int
    rate: float  # requests/s
    attainment: float
    goodput: float

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_prefill, self.num_decode


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate with an attainment of at least TARGET; `at_least` if the highest simulated rate reaches it."""

    rate: float
    at_least: bool = False


def highest_rate(points: Sequence[Point], target: float = TARGET) -> HighestRate | None:
    """goodput90: between the last rate that reaches the target and the next one, attainment is taken as a line.

    None if no rate reaches the target. Raises `ValueError` for points of different shapes.
    """
    if len({point.shape for point in points}) > 1:
        raise ValueError("the points have different shapes")
    rising = sorted(points, key=lambda point: point.rate)
    last = max((index for index, point in enumerate(rising) if point.attainment >= target), default=None)
    if last is None:
        return None
    reached = rising[last]
    if last == len(rising) - 1:
        return HighestRate(reached.rate, at_least=True)
    missed = rising[last + 1]
    share = (reached.attainment - target) / (reached.attainment - missed.attainment)
    return HighestRate(reached.rate + share * (missed.rate - reached.rate))


def highest_rates(points: Sequence[Point], target: float = TARGET) -> dict[tuple[int, int], HighestRate | None]:
    """By shape, in the order of the points."""
    by_shape: defaultdict[tuple[int, int], list[Point]] = defaultdict(list)
    for point in points:
        by_shape[point.shape].append(point)
    return {shape: highest_rate(found, target) for shape, found in by_shape.items()}


def pareto_front(values: Sequence[tuple[int, float]]) -> list[int]:
    """The indexes of the pairs (workers, value) that no other pair beats, by rising number of workers.

    A pair is beaten by one with at most as many workers and a higher value, or fewer workers and at least the value.
    """
    front: list[int] = []
    for index in sorted(range(len(values)), key=lambda index: (values[index][0], -values[index][1], index)):
        if not front or values[index][1] > values[front[-1]][1]:
            front.append(index)
    return front


def fewest_workers(points: Sequence[Point], target: float = TARGET) -> Point | None:
    """The point with the fewest workers that reaches the target; among equals, the one with the highest attainment."""
    reached = [point for point in points if point.attainment >= target]
    return min(reached, key=lambda point: (point.num_workers, -point.attainment), default=None)


def answer(points: Sequence[Point], target: float = TARGET) -> list[str]:
    """What the grid says, in a sentence for each rate, or for each question about rates."""
    rates = sorted({point.rate for point in points})
    by_shape = highest_rates(points, target)
    if len(by_shape) == 1 and len(rates) > 1:
        (found,) = by_shape.values()
        return [_rate_sentence(found, rates, target)]
    sentences = []
    for rate in rates:
        of_rate = [point for point in points if point.rate == rate]
        best = fewest_workers(of_rate, target)
        if best is None:
            top = max(of_rate, key=lambda point: (point.attainment, -point.num_workers))
            sentences.append(
                f"At {rate:.4g} requests/s no size of the pools reaches attainment {target:g}; {_shape(top)} comes "
                f"nearest with {top.attainment:.3f}."
            )
        else:
            sentences.append(
                f"At {rate:.4g} requests/s the fewest workers that reach attainment {target:g} are {best.num_workers}: "
                f"{_shape(best)}, with {best.attainment:.3f}."
            )
    return sentences


def _rate_sentence(found: HighestRate | None, rates: Sequence[float], target: float) -> str:
    name = f"goodput{target * 100:.0f}"
    if found is None:
        return f"{name} is below {rates[0]:.4g} requests/s, the lowest simulated rate."
    if found.at_least:
        return f"{name} is at least {found.rate:.4g} requests/s, the highest simulated rate."
    return f"{name} is {found.rate:.3g} requests/s."


def _shape(point: Point) -> str:
    return f"{point.num_prefill} prefill and {point.num_decode} decode"
