"""A grid of simulations: its axes and points, the Pareto front, the fewest workers and the highest rate."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.replay.replay_result import WANTED_ATTAINMENT, goodput90

WHOLE = ("prefill", "decode")  # axes of whole numbers


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    values: tuple[float, ...]  # rising; whole numbers for the axes in WHOLE


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
