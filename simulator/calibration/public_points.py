"""Fits a `StepCost` to published points: the mean gap between tokens of a server under a fixed number of requests.

Each point has a concurrency, prompt and output length, and the measured gap. Every sequence of the batch computes one
prompt for each output, so a gap has the decodes of the batch and one prompt for each `output` decodes:

    gap = step_s + batch x (context x context_s + (prompt x token_s + prompt^2 / 2 x pair_s) / output)

`context` is the mean one, prompt + output / 2. The fit is least squares of relative errors, and no term is negative. A
cost for each sequence of a batch cannot be told from one for each prompt token, so `sequence_s` is 0.

The file is that of ai-dynamo/aiconfigurator: `mode`, `model_path`, `system`, `backend`, `tp_size`, `isl`, `osl`,
`batch_size` and `silicon_tpot_ms` are read.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.cost.step_cost import StepCost

MIN_POINTS = 6  # four constants, and points that can contradict them
MODE = "agg"  # prefill and decode on one worker: the mode that the formula describes
MAX_GROUPS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Point:
    num_prompt_tokens: int
    num_output_tokens: int
    batch: int
    gap_s: float

    def __post_init__(self) -> None:
        if min(self.num_prompt_tokens, self.num_output_tokens, self.batch) < 1 or not 0.0 < self.gap_s < 3600.0:
            raise ValueError(f"not a measurement: {self}")

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """The factors of `step_s`, `context_s`, `token_s` and `pair_s`."""
        prompts_per_gap = self.batch / self.num_output_tokens
        context = self.num_prompt_tokens + self.num_output_tokens / 2
        pairs = self.num_prompt_tokens**2 / 2
        return 1.0, self.batch * context, prompts_per_gap * self.num_prompt_tokens, prompts_per_gap * pairs


@dataclass(frozen=True, slots=True)
class Group:
    """A server whose points belong together."""

    model: str
    system: str
    backend: str
    tp_size: int

    def __str__(self) -> str:
        return f"{self.model} on {self.system} with {self.backend}, tp {self.tp_size}"


@dataclass(frozen=True, slots=True)
class Filters:
    """Empty = every value. `model` is a part of the name, in any case of letters."""

    model: str = ""
    system: str = ""
    backend: str = ""
    tp_size: int = 0

    def accept(self, group: Group) -> bool:
        return (
            self.model.lower() in group.model.lower()
            and self.system in ("", group.system)
            and self.backend in ("", group.backend)
            and self.tp_size in (0, group.tp_size)
        )


@dataclass(frozen=True, slots=True)
class PointsFit:
    group: Group
    cost: StepCost
    num_points: int
    median_error: float  # share of the measured gap
    largest_error: float


def fit_file(path: Path, filters: Filters) -> PointsFit:
    """Raises `ValueError` for a malformed file, and unless the filters leave the points of one server; `OSError`."""
    found = [(group, point) for group, point in _read(path) if filters.accept(group)]
    groups = Counter(group for group, _ in found)
    if not groups:
        raise ValueError(f"{path}: no point passes the filters")
    if len(groups) > 1:
        shown = [f"{group} ({count} points)" for group, count in groups.most_common(MAX_GROUPS_SHOWN)]
        more = [f"and {len(groups) - MAX_GROUPS_SHOWN} more"] if len(groups) > MAX_GROUPS_SHOWN else []
        raise ValueError(f"{path}: the filters leave {len(groups)} servers: {'; '.join(shown + more)}")
    return fit_points(next(iter(groups)), [point for _, point in found])


def fit_points(group: Group, points: Sequence[Point]) -> PointsFit:
    """Raises `ValueError` for too few points."""
    if len(points) < MIN_POINTS:
        raise ValueError(f"{group}: {len(points)} points, {MIN_POINTS} are needed")
    measured = np.array([point.gap_s for point in points])
    terms = np.array([point.terms for point in points])
    constants = least_squares(terms / measured[:, None])
    errors = np.abs(terms @ constants / measured - 1.0)
    step_s, context_s, token_s, pair_s = (float(value) for value in constants)
    cost = StepCost(step_s=step_s, sequence_s=0.0, context_s=context_s, token_s=token_s, pair_s=pair_s)
    return PointsFit(group, cost, len(points), statistics.median(errors.tolist()), float(errors.max()))


def least_squares(relative: np.ndarray) -> np.ndarray:
    """The constants, none negative, whose sums of terms come nearest to 1.

    The most negative constant becomes 0, and the fit of the others is repeated.
    """
    constants = np.zeros(relative.shape[1])
    scale = np.abs(relative).max(axis=0)  # the terms differ by a factor of a million
    used = np.flatnonzero(scale).tolist()
    while used:
        fitted, *_ = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(relative)), rcond=None)
        if fitted.min() >= 0.0:
            constants[used] = fitted / scale[used]
            break
        del used[int(fitted.argmin())]
    return constants


def _read(path: Path) -> list[tuple[Group, Point]]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        found = []
        for row in rows:
            try:
                if row["mode"] == MODE:
                    found.append((_group(row), _point(row)))
            except KeyError as error:
                raise ValueError(f"{path}, line {rows.line_num}: {error.args[0]} is missing") from error
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    return found


def _group(row: dict[str, str]) -> Group:
    return Group(row["model_path"], row["system"], row["backend"], int(row["tp_size"]))


def _point(row: dict[str, str]) -> Point:
    return Point(int(row["isl"]), int(row["osl"]), int(row["batch_size"]), float(row["silicon_tpot_ms"]) / 1e3)
