"""Replays of traces in virtual time, several at once, and the figures that are read from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.report import Line, Report
from simulator.processes import CountEnded, run_all
from simulator.replay import Replay
from simulator.replay_config import ReplayConfig
from simulator.replay_result import ReplayResult, percentile
from simulator.workloads import Workload


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay, which can be pickled. `load` is cached: every process reads its trace once."""

    load: Callable[[], Workload]
    config: ReplayConfig

    def run(self, on_progress: CountEnded) -> ReplayResult:
        return Replay(self.load(), self.config).run(on_progress)


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    unit: str  # "ms": the least is best; "": the most is best
    of: Callable[[ReplayResult], float]
    is_goal: bool = False

    def median(self, results: Sequence[ReplayResult]) -> float:
        return statistics.median(map(self.of, results))


def ttft_ms(percent: float) -> Callable[[ReplayResult], float]:
    """A request that failed never got its first token."""
    return lambda result: percentile((*result.ttft_s, *[math.inf] * result.num_failed), percent) * 1e3


def percent_ms(times: str, percent: float) -> Callable[[ReplayResult], float]:
    """Of a field of the result."""
    return lambda result: percentile(getattr(result, times), percent) * 1e3


def run_replays(report: Report, runs: Sequence[ReplayRun], num_processes: int) -> list[ReplayResult]:
    """The results in the order of the runs, under a bar of the requests that have ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=report.console, disable=not report.console.is_terminal) as progress:
        bar = progress.add_task("requests", total=sum(len(run.load().requests) for run in runs))
        return run_all(runs, num_processes, lambda done: progress.update(bar, completed=done))


def by_seed(results: Sequence[ReplayResult], num_seeds: int) -> Iterator[list[ReplayResult]]:
    """Groups of `num_seeds`, in order."""
    return (list(results[start : start + num_seeds]) for start in range(0, len(results), num_seeds))


def say_missed(report: Report, goals: Sequence[Line], words: str) -> None:
    missed = [line for line in goals if not line.holds]
    report.say(f"\n{words}: {len(goals) - len(missed)} of {len(goals)} figures")
    for line in missed:
        report.say(f"  not {line.measure}: {line.ratio:.3f} x {line.peer}")
