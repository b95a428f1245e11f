"""`tandem advise`: should this load be served by a prefill and a decode pool, or by undivided workers?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from cli.commands.prometheus_load import read_prometheus
from cli.screens.advise_report import Question, as_json_object, print_advice
from cli.screens.plots import check_plot, plot_advice
from core.errors import ConfigError
from simulator.advice.advice import MIN_REQUESTS
from simulator.advice.advice import advise as find_advice
from simulator.advice.goodput import Load, Slo, load_of
from simulator.advice.shapes import CostModel, scaled_widths
from simulator.calibration.costs import built_in_widths, read_costs
from simulator.processes import CountEnded
from simulator.replay.workload_files import read_workload
from simulator.replay.workloads import Synthetic, synthetic

NUM_SYNTHETIC = 2000
MAX_PROMPT_TOKENS = 32_000_000  # of all synthetic prompts: fewer requests stand for a load of long prompts
MAX_INPUT_TOKENS = MAX_PROMPT_TOKENS // MIN_REQUESTS
SCALED_LIKE = "h100-8b"  # wider workers than the calibrated one gain as those of this model do
POSITIVE = ("slo_ttft_ms", "slo_tpot_ms", "kv_tokens", "requests", "rate", "window_s")


def advise(log: Path | None, options: Mapping[str, Any], as_json: bool, console: Console) -> None:
    """Raises `ConfigError` for options and files without an answer."""
    if options["gpus"] is None:
        raise typer.BadParameter("give the number of GPUs", param_hint="--gpus")
    for name in POSITIVE:
        if options[name] is not None and not 0 < options[name] < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive and finite, is {options[name]:g}")
    if log is not None and options["prometheus"] is not None:
        raise ConfigError("the load is that of a log or of --prometheus, not of both")
    if options["plot"] is not None:
        check_plot(options["plot"])
    slo = Slo(options["slo_ttft_ms"] / 1e3, options["slo_tpot_ms"] / 1e3)
    try:
        model, load = _model(options), _load(log, options)
        with _progress(console) as count:
            advice = find_advice(load, model, slo, options["gpus"], count)
    except OSError as error:
        raise ConfigError(f"cannot open {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    question = Question(load, model, slo, options["gpus"])
    if as_json:
        print(json.dumps(as_json_object(question, advice)))
    else:
        print_advice(question, advice, console)
    if options["plot"] is not None:
        try:
            plot_advice(options["plot"], advice)
        except OSError as error:
            raise ConfigError(f"--plot: cannot write {options['plot']}: {error.strerror}") from error


def _model(options: Mapping[str, Any]) -> CostModel:
    pool_tokens = options["kv_tokens"]
    if options["costs"] is None:
        return CostModel(built_in_widths(f"{options['gpu']}-{options['model']}"), pool_tokens)
    widths = scaled_widths(read_costs(options["costs"]), built_in_widths(SCALED_LIKE))
    return CostModel(widths, pool_tokens, scaled_like=SCALED_LIKE)


def _load(log: Path | None, options: Mapping[str, Any]) -> Load:
    if options["prometheus"] is not None:
        load = read_prometheus(options["prometheus"], options["labels"], options["window_s"], NUM_SYNTHETIC)
    elif log is not None:
        load = load_of(read_workload(log, options["requests"]), is_random=False)
    else:
        load = _load_by_hand(options)
    return replace(load, rate=options["rate"]) if options["rate"] else load


def _load_by_hand(options: Mapping[str, Any]) -> Load:
    """Without a rate."""
    if options["input_tokens"] > MAX_INPUT_TOKENS:
        raise ConfigError(f"--input-tokens must be at most {MAX_INPUT_TOKENS:,}, is {options['input_tokens']:,}")
    config = Synthetic(
        num_requests=min(NUM_SYNTHETIC, MAX_PROMPT_TOKENS // max(1, options["input_tokens"])),
        rate=1.0,
        prompt_tokens=options["input_tokens"],
        output_tokens=options["output_tokens"],
        spread=options["spread"],
        num_groups=int(options["prefix_tokens"] > 0),
        prefix_tokens=options["prefix_tokens"],
    )
    return replace(load_of(synthetic(config), is_random=True), rate=None)


@contextmanager
def _progress(console: Console) -> Iterator[CountEnded]:
    columns = (SpinnerColumn(), TextColumn("{task.completed} trials"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda num_trials: progress.update(task, completed=num_trials)
