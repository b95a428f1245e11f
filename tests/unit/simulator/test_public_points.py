"""The fit to public points finds the constants behind them, and reproduces the built-in ones from their source."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from core.cost.step_cost import StepCost
from simulator.calibration.public_points import Filters, Group, Point, fit_file, fit_points
from simulator.shells.cost_model import H100_8B

MEASURED = Path(__file__).resolve().parents[2] / "data/h100_llama_8b_points.csv"
GROUP = Group("a-model", "h100_sxm", "trtllm", 1)
TRUE = StepCost(step_s=5e-3, sequence_s=0.0, context_s=4e-8, token_s=2e-5, pair_s=6e-10)
HEADER = "model_path,system,backend,tp_size,mode,isl,osl,batch_size,silicon_tpot_ms\n"
H100 = Filters("llama-3.1-8b", "h100_sxm", "trtllm", 1)


def points(cost: StepCost) -> list[Point]:
    found = []
    for batch in (8, 32, 128):
        for prompt in (1024, 2048, 4096):
            for output in (128, 512):
                terms = Point(prompt, output, batch, 1.0).terms
                constants = (cost.step_s, cost.context_s, cost.token_s, cost.pair_s)
                gap_s = sum(term * constant for term, constant in zip(terms, constants, strict=True))
                found.append(Point(prompt, output, batch, gap_s))
    return found


def test_the_fit_finds_the_constants() -> None:
    fit = fit_points(GROUP, points(TRUE))
    assert astuple(fit.cost) == pytest.approx(astuple(TRUE), rel=1e-6)
    assert fit.largest_error < 1e-6


def test_no_constant_is_negative() -> None:
    fit = fit_points(GROUP, points(StepCost(5e-3, 0.0, 4e-8, 2e-5, pair_s=-3e-10)))
    assert min(astuple(fit.cost)) >= 0.0
    assert fit.cost.pair_s == 0.0
    assert 0.0 < fit.median_error <= fit.largest_error < 0.2


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="5 points, 6 are needed"):
        fit_points(GROUP, points(TRUE)[:5])


def written(directory: Path, *rows: str) -> Path:
    path = directory / "points.csv"
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,s,b,1,agg,1024,128,8,fast", "line 3: .*fast"),
        ("m,s,b,one,agg,1024,128,8,7", "line 3: .*one"),
        ("m,s,b,1,agg,1024,0,8,7", "line 3: .*not a measurement"),
        ("m,s,b,1,agg,1024,128,8,-7", "line 3: .*not a measurement"),
        ("m,s,other,1,agg,1024,128,8,7", "leave 2 servers: m on s with b, tp 1 .1 points.; m on s with other"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_file(written(tmp_path, "m,s,b,1,agg,1024,128,8,7.5", row), Filters())


def test_the_built_in_costs_follow_from_the_public_points() -> None:
    fit = fit_file(MEASURED, H100)
    assert astuple(fit.cost) == pytest.approx(astuple(H100_8B), rel=5e-3)
    assert (fit.num_points, round(fit.median_error, 3), round(fit.largest_error, 3)) == (42, 0.018, 0.065)
