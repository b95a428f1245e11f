"""Tables, sentences and JSON of simulations."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from simulator.replay.replay_result import WANTED_ATTAINMENT, ReplayResult, percentile
from simulator.replay.runs import GridResult
from simulator.replay.sweep import Point, fewest_workers, highest_rates, pareto_front

Figure = Callable[[ReplayResult], float]
PERCENTS = (50, 90, 99)
MAX_GRID_ROWS = 40  # of the table; the JSON file has every point


def times_table(results: Sequence[ReplayResult]) -> Table:
    """Milliseconds: the median over the seeds."""
    table = _table("", *(f"p{percent}" for percent in PERCENTS))
    for name, at in _TIMES.items():
        values = (statistics.median(at(result, percent) for result in results) * 1e3 for percent in PERCENTS)
        table.add_row(name, *(f"{value:,.1f} ms" for value in values))
    return table


def figures_table(results: Sequence[ReplayResult]) -> Table:
    """The median over the seeds, and with several seeds the lowest and the highest value."""
    several = len(results) > 1
    table = _table("", "median of seeds", "lowest", "highest") if several else _table("", "")
    for name, figure, form in _FIGURES:
        values = [figure(result) for result in results]
        shown = [statistics.median(values), *((min(values), max(values)) if several else ())]
        table.add_row(name, *(form.format(value) for value in shown))
    return table


def grid_table(points: Sequence[Point]) -> Table:
    """The points of the front of each rate, or every point of a single shape."""
    shown = [point for point, on_front in zip(points, fronts(points), strict=True) if on_front]
    if len({point.shape for point in points}) == 1:
        shown = list(points)
    table = _table("prefill", "decode", "workers", "requests/s", "attainment", "goodput")
    for point in shown[:MAX_GRID_ROWS]:
        table.add_row(
            str(point.num_prefill), str(point.num_decode), str(point.num_workers), f"{point.rate:.4g}",
            f"{point.attainment:.3f}", f"{point.goodput:.4g}/s",
        )  # fmt: skip
    if len(shown) > MAX_GRID_ROWS:
        table.caption = f"and {len(shown) - MAX_GRID_ROWS} more"
    return table


def rates_table(points: Sequence[Point]) -> Table:
    """goodput90 of the shapes that no shape with fewer workers reaches."""
    shapes = list(highest_rates(points).items())
    table = _table("prefill", "decode", "workers", "goodput90")
    for index in pareto_front([(sum(shape), rate) for shape, rate in shapes])[:MAX_GRID_ROWS]:
        (num_prefill, num_decode), rate = shapes[index]
        table.add_row(str(num_prefill), str(num_decode), str(num_prefill + num_decode), f"{rate:.4g}/s")
    return table


def fronts(points: Sequence[Point]) -> list[bool]:
    """For each point, whether no other point of its rate has the same goodput with fewer workers, or more goodput."""
    on_front = [False] * len(points)
    for rate in {point.rate for point in points}:
        indexes = [index for index, point in enumerate(points) if point.rate == rate]
        for index in pareto_front([(points[i].num_workers, points[i].goodput) for i in indexes]):
            on_front[indexes[index]] = True
    return on_front


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


def write_runs(path: Path, options: dict[str, object], results: Sequence[ReplayResult]) -> None:
    """Options and the figures of each seed, with a record of each request. Raises `OSError`."""
    _write(path, {"options": options, "seeds": [result.to_dict(with_requests=True) for result in results]})


def write_grid(path: Path, options: dict[str, object], grid: Sequence[tuple[Point, list[GridResult]]]) -> None:
    """Options, the answer, and the figures of each seed of each point. Raises `OSError`."""
    points = [point for point, _ in grid]
    rows = [
        {
            "prefill": point.num_prefill,
            "decode": point.num_decode,
            "rate": point.rate,
            "attainment": point.attainment,
            "goodput": point.goodput,
            "on_front": on_front,
            "seeds": [result.figures for result in results],
        }
        for (point, results), on_front in zip(grid, fronts(points), strict=True)
    ]
    rates = [
        {"prefill": num_prefill, "decode": num_decode, "goodput90": rate}
        for (num_prefill, num_decode), rate in highest_rates(points).items()
    ]
    has_rates = len({point.rate for point in points}) > 1
    _write(
        path, {"options": options, "answer": answer(points), "points": rows} | ({"rates": rates} if has_rates else {})
    )


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index or name else "left", no_wrap=True)
    return table


_TIMES: dict[str, Callable[[ReplayResult, int], float]] = {
    "TTFT": lambda result, percent: percentile(result.ttft_s, percent),
    "TPOT": lambda result, percent: percentile(result.tpot_s, percent),
    "ITL": lambda result, percent: result.itl_s.get(percent, 0.0),
    "TBT10": lambda result, percent: percentile(result.tbt10_s, percent),
    "queue of the prefill workers": lambda result, percent: percentile(result.prefill_queue_s, percent),
    "transfer after the prefill": lambda result, percent: percentile(result.transfer_exposed_s, percent),
}


def _mean_of(shares: Sequence[float]) -> float:
    return statistics.fmean(shares) if shares else 0.0


_FIGURES: tuple[tuple[str, Figure, str], ...] = (
    ("requests", lambda result: result.num_requests, "{:,.0f}"),
    ("failed or refused", lambda result: result.num_failed, "{:,.0f}"),
    ("arrived", lambda result: result.rate, "{:.4g}/s"),
    ("attainment", lambda result: result.attainment, "{:.3f}"),
    ("goodput", lambda result: result.goodput, "{:.4g}/s"),
    ("hit ratio", lambda result: result.hit_ratio, "{:.3f}"),
    ("share of an infinite cache's hit ratio", lambda result: result.hit_share, "{:.1%}"),
    ("prefill workers: time in steps", lambda result: _mean_of(result.prefill_busy), "{:.1%}"),
    ("prefill workers: blocks in use", lambda result: _mean_of(result.prefill_used), "{:.1%}"),
    ("decode workers: time in steps", lambda result: _mean_of(result.decode_busy), "{:.1%}"),
    ("decode workers: blocks in use", lambda result: _mean_of(result.decode_used), "{:.1%}"),
    ("predicted TTFT: median error", lambda result: percentile(result.prediction_errors, 50), "{:.1%}"),
    ("predicted TTFT: within 20 %", lambda result: result.accurate_share, "{:.1%}"),
)
