"""Simulations as tasks for several processes: of one deployment with several seeds, and of a grid of deployments."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.processes import CountEnded, run_all
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import ReplayResult
from simulator.replay.sweep import Axis, Point, grid
from simulator.replay.workloads import Workload


@dataclass(frozen=True, slots=True)
class SeededRun:
    workload: Workload
    config: ReplayConfig

    def run(self, on_progress: CountEnded) -> ReplayResult:
        return Replay(self.workload, self.config).run(on_progress)


@dataclass(frozen=True, slots=True)
class GridRun:
    """Returns the point and the figures only: the records of all requests of a grid exceed the memory."""

    workload: Workload
    config: ReplayConfig

    def run(self, on_progress: CountEnded) -> GridResult:
        result = Replay(self.workload, self.config).run(on_progress)
        point = Point(
            num_prefill=self.config.num_prefill,
            num_decode=self.config.num_decode,
            rate=self.config.rate or result.rate,
            attainment=result.attainment,
            goodput=result.goodput,
        )
        return GridResult(point, result.to_dict())


@dataclass(frozen=True, slots=True)
class GridResult:
    point: Point
    figures: Mapping[str, object]  # as JSON


def run_seeds(
    workload: Workload, config: ReplayConfig, num_seeds: int, num_processes: int, on_progress: CountEnded
) -> list[ReplayResult]:
    """One result for each of `num_seeds` seeds from `config.seed` on."""
    return run_all([SeededRun(workload, seeded) for seeded in _seeded(config, num_seeds)], num_processes, on_progress)


def run_grid(
    workload: Workload,
    config: ReplayConfig,
    axes: Sequence[Axis],
    num_seeds: int,
    num_processes: int,
    on_progress: CountEnded,
) -> list[tuple[Point, list[GridResult]]]:
    """For each combination of values, the mean point over the seeds, and the result of each seed."""
    configs = [at_values(config, values) for values in grid(axes)]
    tasks = [GridRun(workload, seeded) for changed in configs for seeded in _seeded(changed, num_seeds)]
    results = run_all(tasks, num_processes, on_progress)
    by_config = [results[first : first + num_seeds] for first in range(0, len(results), num_seeds)]
    return [(_mean([result.point for result in found]), found) for found in by_config]


def at_values(config: ReplayConfig, values: Mapping[str, float]) -> ReplayConfig:
    """`config` at one combination of values of the axes. Raises `ValueError` for a pool that it refuses."""
    changes: dict[str, float | int | None] = {}
    for name, value in values.items():
        if name == "rate":
            changes |= {"rate": value, "load": None}
        else:
            changes[f"num_{name}"] = int(value)
    return replace(config, **changes)  # type: ignore[arg-type]


def _seeded(config: ReplayConfig, num_seeds: int) -> list[ReplayConfig]:
    return [replace(config, seed=config.seed + number) for number in range(num_seeds)]


def _mean(points: Sequence[Point]) -> Point:
    return replace(
        points[0],
        rate=statistics.fmean(point.rate for point in points),
        attainment=statistics.fmean(point.attainment for point in points),
        goodput=statistics.fmean(point.goodput for point in points),
    )
