"""`tandem simulate`: replays a workload in virtual time, prints the figures, and sweeps over sizes and rates."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.commands.simulate_flags import SIMULATE_FLAGS
from cli.output_files import check_output
from cli.screens import plots, simulate_report
from core.config import RouterConfig, SchedulerConfig
from core.errors import ConfigError
from simulator.calibration.costs import Costs, read_costs
from simulator.processes import CountEnded
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.runs import run_grid, run_seeds
from simulator.replay.sweep import WHOLE, Axis
from simulator.replay.workload_files import read_workload
from simulator.replay.workloads import Synthetic, Workload, synthetic

SYNTHETIC = "synthetic"
ARRIVALS = ("trace", "poisson", "gamma")
OF_SYNTHETIC = ("burstiness", "input_tokens", "output_tokens", "spread", "prefix_groups", "prefix_tokens")
OF_FILES = ("divisor", "output_divisor", "session_rate")
NUM_SYNTHETIC = 1000
MAX_IN_FLIGHT = 1024  # of one worker
AXES = (*WHOLE, "rate")
MAX_POINTS = 4096
MAX_WORKERS = 4096  # of each role
FLAG_OF = {flag.parameter: f"--{flag.name}" for flag in SIMULATE_FLAGS} | {
    "num_prefill": "--prefill", "num_decode": "--decode", "num_routers": "--routers",
    "prompt_tokens": "--input-tokens", "num_groups": "--prefix-groups", "num_requests": "--requests",
    "sessions_per_s": "--session-rate",
}  # fmt: skip
# Errors of values begin with their names. Those of a file begin with its path, and its names are no flags.
NAME = re.compile(rf"\b(?:{'|'.join(FLAG_OF)})\b")
NAMES_IN_ERROR = re.compile(rf"\A{NAME.pattern}(?: (?:and|x) {NAME.pattern})*(?= must )")


def simulate(options: Mapping[str, Any], console: Console) -> None:
    """Raises `ConfigError` for options that do not fit together and for missing or malformed files, and `OSError`."""
    axes = _axes(options)
    _check(options, axes)
    try:
        costs = read_costs(options["costs"])
        config = _config(options, costs)
        workload = _workload(options)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    except (ValueError, ConfigError) as error:
        text = NAMES_IN_ERROR.sub(lambda names: NAME.sub(lambda name: FLAG_OF[name[0]], names[0]), str(error))
        raise ConfigError(text) from error
    if axes:
        _sweep(workload, config, axes, options, console)
    else:
        _run(workload, config, options, console)


def _run(workload: Workload, config: ReplayConfig, options: Mapping[str, Any], console: Console) -> None:
    num_seeds = options["seeds"]
    with _progress(console, num_seeds * len(workload.requests)) as count:
        results = run_seeds(workload, config, num_seeds, _num_processes(options), count)
    _print_load(workload, config, options, console)
    console.print(simulate_report.times_table(results))
    console.print(simulate_report.figures_table(results))
    if options["json"]:
        simulate_report.write_runs(options["json"], _shown(options), results)
    if options["plot"]:
        plots.plot_runs(options["plot"], results)


def _sweep(
    workload: Workload, config: ReplayConfig, axes: Sequence[Axis], options: Mapping[str, Any], console: Console
) -> None:
    num_seeds = options["seeds"]
    num_runs = num_seeds * math.prod(len(axis.values) for axis in axes)
    with _progress(console, num_runs * len(workload.requests)) as count:
        try:
            grid = run_grid(workload, config, axes, num_seeds, _num_processes(options), count)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    points = [point for point, _ in grid]
    _print_load(workload, config, options, console)
    console.print(simulate_report.grid_table(points))
    if len({point.rate for point in points}) > 1 and len({point.shape for point in points}) > 1:
        console.print(simulate_report.rates_table(points))
    for sentence in simulate_report.answer(points):
        console.print(sentence, highlight=False)
    if options["json"]:
        simulate_report.write_grid(options["json"], _shown(options), grid)
    if options["plot"]:
        plots.plot_grid(options["plot"], points)


# ---- options


def _axes(options: Mapping[str, Any]) -> tuple[Axis, ...]:
    words = [word for text in options["sweep"] or () for word in text.split()]
    if not words:
        return ()
    try:
        return parse_sweep(words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sweep") from error


def parse_sweep(words: Sequence[str]) -> tuple[Axis, ...]:
    """Axes from the words of `--sweep`. Raises `ValueError` that names the word.

    prefill=1..16 decode=1..16        every pair of sizes of the two pools
    rate=0.5..8:0.5                   rates in steps of 0.5 requests/s
    prefill=1,2,4,8 rate=1..8         values by name, and both kinds of axis together
    """
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
    if not equals or name not in AXES:
        raise ValueError(f"{word!r} is no axis: write one of {', '.join(AXES)}, then =, then values such as 1..16")
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


def _check(options: Mapping[str, Any], axes: Sequence[Axis]) -> None:
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be a finite number, is {value}")
    if options["plot"]:
        plots.check_plot(options["plot"])
    check_output("--json", options["json"])
    if options["load"] is not None and any(axis.name == "prefill" for axis in axes):
        raise ConfigError("--load follows the number of prefill workers: give --rate with --sweep prefill=...")
    _check_used(options)
    for name in ("seeds", "processes", "requests"):
        if options[name] is not None and options[name] < 1:
            raise ConfigError(f"--{name} must be at least 1, is {options[name]}")


def _check_used(options: Mapping[str, Any]) -> None:
    """Refuses options that the workload does not use."""
    if options["workload"] == SYNTHETIC:
        needs = dict.fromkeys(OF_FILES, "a file as --workload")
    else:
        needs = dict.fromkeys(OF_SYNTHETIC, "synthetic requests")
    if options["arrivals"] != "gamma":
        needs["burstiness"] = "--arrivals gamma"
    for flag in SIMULATE_FLAGS:
        if flag.parameter in needs and options[flag.parameter] != flag.default:
            raise ConfigError(f"--{flag.name} needs {needs[flag.parameter]}")


def _config(options: Mapping[str, Any], costs: Costs) -> ReplayConfig:
    arrivals = options["arrivals"] or ("poisson" if options["workload"] == SYNTHETIC else "trace")
    if arrivals not in ARRIVALS:
        raise ConfigError(f"--arrivals must be one of {', '.join(ARRIVALS)}, is {arrivals}")
    if arrivals != "trace" and options["workload"] != SYNTHETIC and options["rate"] is options["load"] is None:
        raise ConfigError(f"--arrivals {arrivals} needs --rate or --load")
    if arrivals == "gamma" and options["workload"] != SYNTHETIC:
        raise ConfigError("--arrivals gamma is for synthetic requests")
    base = ReplayConfig()
    max_batched_tokens = options["max_batched_tokens"] or costs.max_step_tokens
    scheduler = SchedulerConfig(
        max_batched_tokens=max_batched_tokens,
        max_running=min(base.scheduler.max_running, max_batched_tokens),
        max_waiting=base.scheduler.max_waiting,
        slo_itl_ms=options["slo_itl_ms"],
    )
    router = RouterConfig(
        max_in_flight_per_worker=MAX_IN_FLIGHT,
        slo_ttft_ms=options["slo_ttft_ms"],
        admission=options["admission"],
        local_prefill=options["local_prefill"],
        peer_prefixes=options["peer_prefixes"],
    )
    return ReplayConfig(
        num_routers=options["routers"],
        num_prefill=options["prefill"],
        num_decode=options["decode"],
        prefill_pool_tokens=options["prefill_pool_tokens"],
        decode_pool_tokens=options["decode_pool_tokens"],
        layout=costs.layout(options["block_size"]),
        load=options["load"],
        rate=options["rate"],
        poisson=arrivals == "poisson" and options["workload"] != SYNTHETIC,
        seed=options["seed"],
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        link=costs.link,
        message_delay_s=costs.message_delay_s,
        slo_ttft_s=options["slo_ttft_ms"] / 1e3,
        slo_tpot_s=options["slo_itl_ms"] / 1e3,
        router=router,
        scheduler=scheduler,
    )


def _workload(options: Mapping[str, Any]) -> Workload:
    if options["workload"] == SYNTHETIC:
        return _synthetic(options)
    return read_workload(
        Path(options["workload"]), options["requests"], options["divisor"], options["output_divisor"],
        options["session_rate"], options["seed"],
    )  # fmt: skip


def _synthetic(options: Mapping[str, Any]) -> Workload:
    if options["arrivals"] == "trace":
        raise ConfigError("--arrivals trace needs a file as --workload")
    config = Synthetic(
        num_requests=options["requests"] or NUM_SYNTHETIC,
        rate=options["rate"] or 1.0,
        burstiness=options["burstiness"] if options["arrivals"] == "gamma" else 1.0,
        prompt_tokens=options["input_tokens"],
        output_tokens=options["output_tokens"],
        spread=options["spread"],
        num_groups=options["prefix_groups"],
        prefix_tokens=options["prefix_tokens"],
    )
    return synthetic(config, options["seed"])


def _num_processes(options: Mapping[str, Any]) -> int:
    return int(options["processes"] or os.cpu_count() or 1)


def _shown(options: Mapping[str, Any]) -> dict[str, object]:
    """For JSON: every option."""
    return json.loads(json.dumps(dict(options), default=str))  # type: ignore[no-any-return]


# ---- output


def _print_load(workload: Workload, config: ReplayConfig, options: Mapping[str, Any], console: Console) -> None:
    shape = "" if options["sweep"] else f", {config.num_prefill} prefill and {config.num_decode} decode workers"
    console.print(
        f"{workload.name}: {len(workload.requests):,} requests{shape}, TTFT within {config.slo_ttft_s * 1e3:g} ms and "
        f"TPOT within {config.slo_tpot_s * 1e3:g} ms, costs {options['costs']}",
        highlight=False, markup=False,
    )  # fmt: skip


@contextmanager
def _progress(console: Console, num_requests: int) -> Iterator[CountEnded]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=num_requests)
        yield lambda num_ended: progress.update(bar, completed=num_ended)
