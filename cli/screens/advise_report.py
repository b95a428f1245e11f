"""The answer of `tandem advise` on one screen, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from cli.screens.terminal import print_line
from simulator.advice.advice import Advice, Candidate, Contest, Verdict
from simulator.advice.goodput import Load, Slo
from simulator.advice.shapes import CostModel
from simulator.replay.replay_result import WANTED_ATTAINMENT

MAX_ROWS = 9
FULL = 0.97  # share of a KV pool
IDLE = 0.5  # share of the time; a decode pool that is less busy is not what makes tokens slow
MEASURED_PROMPT_TOKENS = 4096  # the longest prompt of the public points behind the built-in costs
NOT_MODELLED = (
    "Not modelled: failures, the prefix cache of each worker (a hit is a hit on every shape), queues in the router, "
    "preemption, and networks that several workers share."
)


@dataclass(frozen=True, slots=True)
class Question:
    load: Load
    model: CostModel
    slo: Slo
    num_gpus: int


def print_advice(question: Question, advice: Advice, console: Console) -> None:
    print_line(console, _asked(question))
    console.print(_table(advice))
    for line in _conclusion(question, advice):
        print_line(console, line)


def as_json_object(question: Question, advice: Advice) -> dict[str, object]:
    return {
        "verdict": advice.verdict.value,
        "sentences": list(_conclusion(question, advice)),
        "gpus": question.num_gpus,
        "groups": advice.num_groups,
        "slo": asdict(question.slo),
        "mean": asdict(question.load.mean),
        "rate": question.load.rate,
        "shapes": [asdict(one) | {"name": str(one.shape), "limit": limit_of(one)} for one in advice.candidates],
        "scenarios": [asdict(one) | {"gain": one.gain if math.isfinite(one.gain) else None} for one in advice.contests],
    }


def _asked(question: Question) -> str:
    load, mean, slo = question.load, question.load.mean, question.slo
    cached = f" ({mean.num_cached_tokens / mean.num_prompt_tokens:.0%} cached)" if mean.num_cached_tokens else ""
    rate = f" at {load.rate:.3g}/s" if load.rate else ""
    return (
        f"{load.name}: {len(load.jobs):,} requests{rate}, on average {mean.num_prompt_tokens:,} prompt tokens{cached} "
        f"and {mean.num_output_tokens:,} output tokens. {question.num_gpus} GPUs; {WANTED_ATTAINMENT:.0%} of requests "
        f"with TTFT within {slo.ttft_s * 1e3:g} ms and TPOT within {slo.tpot_s * 1e3:g} ms."
    )


def _table(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("shape" if advice.num_groups == 1 else f"shape of each of {advice.num_groups} groups")
    table.add_column("goodput", justify="right", no_wrap=True)
    table.add_column("band", justify="right", no_wrap=True)
    table.add_column("beyond it")
    rows = sorted(advice.candidates, key=lambda one: (one.is_bound, one.low is None, -one.goodput))
    for one in rows[:MAX_ROWS]:
        band = "" if one.low is None else f"{one.low:.3g} to {one.high:.3g}/s"
        table.add_row(str(one.shape), f"{'below ' if one.is_bound else ''}{one.goodput:.3g}/s", band, limit_of(one))
    if len(rows) > MAX_ROWS:
        table.caption = f"and {len(rows) - MAX_ROWS} more with less"
    return table


def limit_of(one: Candidate) -> str:
    """What requests miss first at a higher rate, and the resource behind it."""
    trial = one.beyond
    if not one.goodput:
        return f"at any load, {'first tokens are late' if trial.late_share >= trial.slow_share else 'tokens are slow'}"
    if one.shape.is_split:
        is_late = trial.late_share > trial.slow_share
        if is_late or (trial.late_share == trial.slow_share and trial.busy[0] > trial.busy[1]):
            return f"first tokens are late: prefill pool {trial.busy[0]:.0%} busy with prompts"
        if trial.pool_used >= FULL:
            return "tokens are slow: the decode pool has no more room for KV"
        if trial.busy[1] < IDLE:
            return "tokens are slow: KV waits for the link"
        return f"tokens are slow: decode pool {trial.busy[1]:.0%} busy reading weights and KV"
    if trial.pool_used >= FULL:
        return "no more room for KV"
    if trial.late_share >= trial.slow_share:
        return f"first tokens are late: {trial.busy[0]:.0%} busy, {trial.prompt_share:.0%} of it with prompts"
    return f"tokens are slow: {trial.prompt_share:.0%} of the time of steps is prompts"


def _conclusion(question: Question, advice: Advice) -> Iterator[str]:
    yield _sentence(question, advice)
    if advice.verdict is Verdict.NEITHER:
        return
    if question.load.rate:
        yield from _at_own_rate(question.load.rate, advice)
    yield from _price(question, advice)
    yield from _grounds(question)
    yield NOT_MODELLED


def _sentence(question: Question, advice: Advice) -> str:
    split, undivided = advice.best_of(is_split=True), advice.best_of(is_split=False)
    lowest, highest = _gain(advice.worst), _gain(advice.best)
    match advice.verdict:
        case Verdict.SPLIT:
            return (
                f"Split: {split and split.shape} carries {advice.contests[0].split:.3g} requests/s, "
                f"{_gain(advice.contests[0])} beside the best undivided fleet, and {lowest} in the worst scenario."
            )
        case Verdict.DO_NOT_SPLIT:
            return (
                f"Do not split: {undivided and undivided.shape} carries {advice.contests[0].undivided:.3g} requests/s; "
                f"a split changes that by {lowest} to {highest}."
            )
        case Verdict.UNDECIDED:
            if empty := advice.without_answer:
                return (
                    f"Undecided: in {len(empty)} of {len(advice.contests)} scenarios ({empty[0].scenario}) no shape "
                    "keeps these limits at any load."
                )
            return (
                f"Undecided: a split changes the goodput by {lowest} ({advice.worst.scenario}) to {highest} "
                f"({advice.best.scenario}), which is within what the model may err."
            )
        case Verdict.NEITHER:
            return f"Neither: no shape of {question.num_gpus} GPUs keeps these limits at any load."


def _gain(contest: Contest) -> str:
    return f"{contest.gain:+.0%}" if math.isfinite(contest.gain) else "from nothing to something"


def _at_own_rate(rate: float, advice: Advice) -> Iterator[str]:
    lowest = min(contest.undivided for contest in advice.contests)
    highest = max(max(contest.undivided, contest.split) for contest in advice.contests)
    if rate <= lowest:
        yield f"Your {rate:.3g} requests/s need no split: undivided workers carry at least {lowest:.3g}."
    elif rate > highest:
        yield f"Your {rate:.3g} requests/s are more than any shape carries: at most {highest:.3g}."


def _price(question: Question, advice: Advice) -> Iterator[str]:
    """Of being wrong, in goodput and in GPUs."""
    worst, best = advice.worst, advice.best
    if worst.gain < 0.0:
        gpus = -worst.gain * question.num_gpus
        yield f"Price of a split if {worst.scenario}: {worst.gain:+.0%} goodput, as if {gpus:.1f} GPUs were missing."
    if best.gain > 0.0:
        yield (
            f"Price of no split if {best.scenario}: {best.undivided:.3g} in place of {best.split:.3g} requests/s "
            f"({_gain(best)} forgone)."
        )


def _grounds(question: Question) -> Iterator[str]:
    model, jobs = question.model, question.load.jobs
    errors = ", ".join(f"{model.error(width):.0%}" for width in model.widths)
    widths = ", ".join(str(width) for width in model.widths)
    yield (
        f"Costs: {model.widths[min(model.widths)].source}. Times are taken to err by {errors} for workers of "
        f"{widths} GPUs; {model.pool_tokens:,} tokens of KV a GPU."
    )
    if model.scaled_like:
        yield f"Wider workers were not measured: they gain from their GPUs as those of {model.scaled_like} do."
    long = sum(job.num_prompt_tokens > MEASURED_PROMPT_TOKENS for job in jobs) / len(jobs)
    if long > 0.05 and not model.scaled_like:
        yield f"{long:.0%} of the prompts are longer than the {MEASURED_PROMPT_TOKENS:,} tokens of the measurements."
