"""Charts of simulations and of advice, as PNG or SVG. They need the optional extra `plots` (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output_files import check_output
from cli.screens.simulate_report import fronts
from core.errors import ConfigError
from simulator.advice.advice import Advice
from simulator.replay.replay_result import WANTED_ATTAINMENT, ReplayResult, goodput90
from simulator.replay.sweep import Point, fewest_workers, highest_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MAX_LABELS = 20  # names of points on a front
MAX_OF_KIND = 3  # undivided fleets, and splits, on a chart


def check_plot(path: Path) -> None:
    """Raises `ConfigError` before a long simulation if its chart cannot be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot: {path}: a chart ends in {' or '.join(FORMATS)}")
    check_output("--plot", path)
    _new_figure(num_axes=1)


def plot_runs(path: Path, results: Sequence[ReplayResult]) -> None:
    """Shares of requests by TTFT, TPOT and TBT10, with the limits; a line for each seed. Raises `OSError`."""
    figure, axes = _new_figure(3)
    first = results[0]
    curves = (
        ("TTFT", [result.ttft_s for result in results], first.slo_ttft_s),
        ("TPOT", [result.tpot_s for result in results], first.slo_tpot_s),
        ("TBT10", [result.tbt10_s for result in results], None),
    )
    for axis, (name, seeds, limit_s) in zip(axes, curves, strict=True):
        for values in seeds:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axis.step([value * 1e3 for value in values], shares, where="post", linewidth=1.2)
        if limit_s is not None:
            axis.axvline(limit_s * 1e3, color="black", linestyle=":", label=f"limit {limit_s * 1e3:g} ms")
            axis.legend(loc="lower right")
        if all(values and 0 < values[0] < values[-1] / 10 for values in seeds):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set(xlabel=f"{name} in ms", ylabel="share of the requests", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    _save(figure, path)


def plot_grid(path: Path, points: Sequence[Point]) -> None:
    """A Pareto chart for shapes, attainment by rate for rates, both for both. Raises `OSError`."""
    has_shapes = len({point.shape for point in points}) > 1
    has_rates = len({point.rate for point in points}) > 1
    if not has_shapes:
        figure, (axis,) = _new_figure(1)
        _draw_rates(axis, points)
    elif has_rates:
        figure, (left, right) = _new_figure(2)
        _draw_highest_rates(left, points)
        for shape in list(highest_rates(points))[:MAX_LABELS]:
            _draw_attainment(right, [point for point in points if point.shape == shape], f"{shape[0]} + {shape[1]}")
        right.legend(fontsize="small", title="prefill + decode")
    else:
        figure, (left, right) = _new_figure(2)
        _draw_front(left, points)
        _draw_map(right, points)
    _save(figure, path)


def plot_advice(path: Path, advice: Advice) -> None:
    """Attainment by rate: of the best undivided fleets dotted, of the best splits solid. Raises `OSError`."""
    figure, (axis,) = _new_figure(1)
    for is_split, style in ((False, "o:"), (True, "o-")):
        best = [one for one in advice.candidates if one.shape.is_split is is_split and not one.is_bound]
        for one in best[:MAX_OF_KIND]:
            axis.plot(*zip(*one.tried, strict=True), style, markersize=3, label=str(one.shape))
    axis.axhline(WANTED_ATTAINMENT, color="black", linewidth=0.8)
    axis.set(xlabel="requests/s", ylabel="share of requests inside both limits", xlim=(0, None), ylim=(0, 1.02))
    axis.legend(
        fontsize="small", title=None if advice.num_groups == 1 else f"shape of each of {advice.num_groups} groups"
    )
    axis.grid(alpha=0.3)
    _save(figure, path)


def _draw_rates(axis: Axes, points: Sequence[Point]) -> None:
    _draw_attainment(axis, points, "attainment")
    highest = goodput90([(point.rate, point.attainment) for point in points])
    if highest:
        axis.axvline(highest, color="black", linestyle=":", label=f"goodput90 = {highest:.3g}/s")
    axis.legend()


def _draw_attainment(axis: Axes, points: Sequence[Point], name: str) -> None:
    rising_points = sorted(points, key=lambda point: point.rate)
    axis.plot([p.rate for p in rising_points], [p.attainment for p in rising_points], marker="o", label=name)
    axis.axhline(WANTED_ATTAINMENT, color="gray", linewidth=0.8)
    axis.set(xlabel="requests/s", ylabel="attainment", ylim=(0, 1.02))
    axis.grid(alpha=0.3)


def _draw_highest_rates(axis: Axes, points: Sequence[Point]) -> None:
    rates = [Point(*shape, rate=0.0, attainment=0.0, goodput=rate) for shape, rate in highest_rates(points).items()]
    _draw_points(axis, rates, colored=False)
    axis.set(xlabel="workers (prefill + decode)", ylabel="goodput90 in requests/s")


def _draw_front(axis: Axes, points: Sequence[Point]) -> None:
    _draw_points(axis, points, colored=True)
    best = fewest_workers(points)
    if best is not None:
        name = f"fewest for attainment {WANTED_ATTAINMENT:g}: {best.num_prefill} + {best.num_decode}"
        axis.scatter([best.num_workers], [best.goodput], s=160, facecolors="none", edgecolors="red", label=name)
    axis.axhline(points[0].rate, color="gray", linewidth=0.8, label="requests/s that arrive")
    axis.legend(loc="lower right")
    axis.set(xlabel="workers (prefill + decode)", ylabel="goodput in requests/s", ylim=(0, points[0].rate * 1.05))


def _draw_points(axis: Axes, points: Sequence[Point], *, colored: bool) -> None:
    """Each point, a line through the front, and the shapes on it."""
    dots = axis.scatter([point.num_workers for point in points], [point.goodput for point in points], s=14)
    if colored:
        dots.set_array([point.attainment for point in points])
        dots.set_clim(0, 1)
    on_front = [point for point, is_on_front in zip(points, fronts(points), strict=True) if is_on_front]
    front = sorted(on_front, key=lambda point: point.num_workers)
    axis.step([p.num_workers for p in front], [p.goodput for p in front], where="post", linewidth=1)
    for point in front[:MAX_LABELS]:
        name = f"{point.num_prefill}+{point.num_decode}"
        axis.annotate(name, (point.num_workers, point.goodput), xytext=(3, -9), textcoords="offset points", fontsize=7)
    axis.set_ylim(bottom=0)
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.3)


def _draw_map(axis: Axes, points: Sequence[Point]) -> None:
    """Attainment by size of both pools."""
    prefill = sorted({point.num_prefill for point in points})
    decode = sorted({point.num_decode for point in points})
    by_shape = {point.shape: point.attainment for point in points}
    image = axis.imshow([[by_shape[p, d] for d in decode] for p in prefill], origin="lower", vmin=0, vmax=1)
    axis.set_xticks(range(len(decode)), [str(count) for count in decode])
    axis.set_yticks(range(len(prefill)), [str(count) for count in prefill])
    axis.set(xlabel="decode workers", ylabel="prefill workers", title="attainment")
    axis.figure.colorbar(image, ax=axis)


def _new_figure(num_axes: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure  # without pyplot, so that no window system is looked for
    except ImportError as error:
        raise ConfigError("charts need matplotlib: install the extra, pip install 'tandem-serve[plots]'") from error
    figure = Figure(figsize=(5.5 * num_axes, 4.2), layout="constrained")
    return figure, [figure.add_subplot(1, num_axes, number + 1) for number in range(num_axes)]


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
