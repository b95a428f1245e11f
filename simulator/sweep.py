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

from simulator.replay_result import WANTED_ATTAINMENT, goodput90

WHOLE = ("prefill", "decode")  # axes of whole numbers
NAMES = (*WHOLE, "rate")
MAX_POINTS = 4096
MAX_WORKERS = 4096  # of each role


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


def highest_rates(points: Sequence[Point]) -> dict[tuple[int, int], float]:
    """goodput90 of each shape, in the order of the points; 0 if its lowest rate misses."""
    by_shape: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        by_shape[point.shape].append((point.rate, point.attainment))
    return {shape: goodput90(found) for shape, found in by_shape.items()}


def pareto_front(values: Sequence[tuple[int, float]]) -> list[int]:
    """The indexes of the pairs (workers, value) that no other pair beats, by rising number of workers.

    A pair is beaten by one with at most as many workers and a higher value, or fewer workers and at least the value.
    """
    front: list[int] = []
    for index in sorted(range(len(values)), key=lambda index: (values[index][0], -values[index][1], index)):
        if not front or values[index][1] > values[front[-1]][1]:
            front.append(index)
    return front


def fewest_workers(points: Sequence[Point], target: float = WANTED_ATTAINMENT) -> Point | None:
    """The point with the fewest workers that reaches the target; among equals, the one with the highest attainment."""
    reached = [point for point in points if point.attainment >= target]
    return min(reached, key=lambda point: (point.num_workers, -point.attainment), default=None)


def answer(points: Sequence[Point]) -> list[str]:
    """The conclusion of the grid: a sentence about the highest rate if only rates differ, else one for each rate."""
    by_rate: defaultdict[float, list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.rate):
        by_rate[point.rate].append(point)
    shapes = highest_rates(points)
    if len(shapes) == 1 and len(by_rate) > 1:
        return [_rate_sentence(next(iter(shapes.values())), points)]
    return [_workers_sentence(f"{rate:.4g} requests/s", found) for rate, found in by_rate.items()]


def _rate_sentence(rate: float, points: Sequence[Point]) -> str:
    rates = [point.rate for point in points]
    if not rate:
        return f"goodput90 is below {min(rates):.4g} requests/s, the lowest simulated rate."
    if rate == max(rates):
        return f"goodput90 is at least {rate:.4g} requests/s, the highest simulated rate."
    return f"goodput90 is {rate:.3g} requests/s: the highest rate with attainment {WANTED_ATTAINMENT:g}."


def _workers_sentence(rate: str, points: Sequence[Point]) -> str:
    best = fewest_workers(points)
    if best is None:
        top = max(points, key=lambda point: (point.attainment, -point.num_workers))
        return (
            f"At {rate} no simulated size of the pools reaches attainment {WANTED_ATTAINMENT:g}; "
            f"{_shape(top)} come nearest with {top.attainment:.3f}."
        )
    return (
        f"At {rate} the fewest workers that reach attainment {WANTED_ATTAINMENT:g} are {best.num_workers}: "
        f"{_shape(best)}, with {best.attainment:.3f}."
    )


def _shape(point: Point) -> str:
    return f"{point.num_prefill} prefill and {point.num_decode} decode"
