"""The figures of a replay, of many simulations, and of a grid of them."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import __main__ as simulator_command
from simulator.processes import CountEnded, run_all
from simulator.replay.replay_result import (
    GapHistogram,
    ReplayResult,
    RequestRecord,
    goodput90,
    percentile,
    worst_tenth_mean,
)
from simulator.replay.sweep import Axis, Point, grid, highest_rates, pareto_front

FAST = RequestRecord(
    request_id="r0",
    arrived_at=0.0,
    num_prompt_tokens=100,
    num_output_tokens=11,
    ttft_s=0.5,
    tpot_s=0.02,
    tbt10_s=0.03,
    cached_tokens=60,
    path="disaggregated",
    predicted_ttft_s=0.55,
    attempts=1,
)


def result(*records: RequestRecord) -> ReplayResult:
    return ReplayResult(
        requests=records,
        slo_ttft_s=1.0,
        slo_tpot_s=0.05,
        arrivals_s=2.0,
        duration_s=4.0,
        infinite_hit_ratio=0.5,
        itl_s={50: 0.02, 90: 0.03, 99: 0.04},
        prefill_queue_s=(0.1,),
        router_queue_s=(0.0,),
        transfer_exposed_s=(),
        prefill_busy=(0.2, 0.4),
        decode_busy=(0.5,),
        prefill_used=(0.1, 0.1),
        decode_used=(0.3,),
        requests_by_router=(len(records),),
        num_events=7,
    )


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, True),
        ({"ttft_s": 1.0, "tpot_s": 0.05}, True),
        ({"ttft_s": 1.01}, False),
        ({"tpot_s": 0.051}, False),
        ({"tpot_s": None, "num_output_tokens": 1}, True),
        ({"error": "QueueFull"}, False),
        ({"ttft_s": None, "error": "DeadlineExceeded"}, False),
    ],
)
def test_a_request_attains_both_limits_or_misses(changes: dict[str, object], within: bool) -> None:
    assert replace(FAST, **changes).within(1.0, 0.05) is within  # type: ignore[arg-type]


def test_refusals_and_late_requests_lower_attainment_and_goodput() -> None:
    figures = result(FAST, replace(FAST, ttft_s=3.0), replace(FAST, ttft_s=None, error="QueueFull"), FAST)
    assert (figures.attainment, figures.goodput, figures.rate) == (0.5, 0.5, 2.0)
    assert (figures.num_requests, figures.num_failed) == (4, 1)
    assert figures.ttft_s == (0.5, 0.5, 3.0)


def test_the_hit_ratio_counts_tokens_of_finished_requests() -> None:
    figures = result(FAST, replace(FAST, num_prompt_tokens=300, cached_tokens=20), replace(FAST, error="QueueFull"))
    assert figures.hit_ratio == pytest.approx(80 / 400)
    assert figures.hit_share == pytest.approx(0.4)


def test_prediction_errors_are_those_of_first_attempts() -> None:
    figures = result(FAST, replace(FAST, predicted_ttft_s=1.0), replace(FAST, attempts=2, predicted_ttft_s=9.0))
    assert figures.prediction_errors == pytest.approx((0.1, 1.0))
    assert figures.accurate_share == 0.5


def test_a_result_travels_between_processes_and_becomes_json() -> None:
    figures = result(FAST, replace(FAST, path="local", ttft_s=1.5))
    copy = pickle.loads(pickle.dumps(figures))
    assert copy == figures
    written = json.loads(json.dumps(copy.to_dict(with_requests=True)))
    assert written["ttft_s"] == {"p50": 1.5, "p90": 1.5, "p99": 1.5}
    assert written["paths"] == {"disaggregated": 1, "local": 1}
    assert written["prefill_busy"] == pytest.approx({"mean": 0.3, "min": 0.2, "max": 0.4})
    assert written["itl_s"]["p90"] == 0.03
    assert [row["request_id"] for row in written["requests"]] == ["r0", "r0"]
    assert "requests" not in figures.to_dict()


def test_percentiles_of_known_values() -> None:
    rising = tuple(float(value) for value in range(100))
    assert (percentile(rising, 50), percentile(rising, 99), percentile((), 50)) == (50.0, 99.0, 0.0)


def test_tbt10_is_the_mean_of_the_worst_tenth_and_at_least_of_one_gap() -> None:
    assert worst_tenth_mean([0.1, 0.4, 0.2]) == 0.4
    assert worst_tenth_mean([float(gap) for gap in range(20)]) == 18.5
    with pytest.raises(ValueError, match="no gap"):
        worst_tenth_mean([])


@given(st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=200), st.sampled_from([0, 50, 90, 99, 100]))
def test_a_histogram_of_gaps_is_within_1_percent(gaps: list[float], percent: int) -> None:
    histogram = GapHistogram()
    histogram.add_all(gaps)
    assert histogram.percentile(percent) == pytest.approx(percentile(sorted(gaps), percent), rel=0.01)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], 0.0),
        ([(1.0, 0.8)], 0.0),
        ([(1.0, 1.0), (2.0, 0.95)], 2.0),
        ([(2.0, 0.8), (1.0, 1.0)], 1.5),
        ([(1.0, 1.0), (2.0, 0.7), (3.0, 0.95)], 1.0 + 1 / 3),
    ],
)
def test_goodput90_is_interpolated_up_to_the_first_miss(points: list[tuple[float, float]], expected: float) -> None:
    random.Random(0).shuffle(points)
    assert goodput90(points) == pytest.approx(expected)


# ---- many simulations: in several processes, over a grid, and the command that replays a failed seed


def test_the_simulator_prints_the_command_that_replays_a_failed_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(seed: int, *_: object, **__: object) -> None:
        raise AssertionError(f"seed {seed} is broken")

    monkeypatch.setattr(simulator_command, "run_seed", broken)
    assert simulator_command.main(["--harsh", "--seeds", "7..8"]) == 1
    assert "python -m simulator --harsh --seed 8 --verbose" in capsys.readouterr().err


@dataclass(frozen=True)
class Counting:
    number: int
    fails: bool = False

    def run(self, on_progress: CountEnded) -> int:
        if self.fails:
            raise ValueError(f"task {self.number}")
        on_progress(self.number // 2)
        on_progress(self.number)
        return self.number**2


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_are_in_the_order_of_the_tasks(num_processes: int) -> None:
    seen: list[int] = []
    assert run_all([Counting(number) for number in (5, 1, 4)], num_processes, seen.append) == [25, 1, 16]
    assert seen[-1] == 10
    assert seen == sorted(seen)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_of_a_task_is_raised(num_processes: int) -> None:
    with pytest.raises(ValueError, match="task 1"):
        run_all([Counting(0), Counting(1, fails=True), Counting(2)], num_processes, lambda _: None)


def point(num_prefill: int, num_decode: int, attainment: float, rate: float = 2.0) -> Point:
    return Point(num_prefill, num_decode, rate, attainment, goodput=attainment * rate)


def test_a_grid_has_every_combination() -> None:
    points = grid([Axis("prefill", (1, 2)), Axis("rate", (3.0, 4.0))])
    assert points == [{"prefill": prefill, "rate": rate} for prefill in (1, 2) for rate in (3.0, 4.0)]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6).map(float)), min_size=1, max_size=12))
def test_the_front_is_what_no_pair_beats(values: list[tuple[int, float]]) -> None:
    front = pareto_front(values)
    for index, (workers, value) in enumerate(values):
        is_beaten = any(
            (w <= workers and v > value) or (w < workers and v >= value) for w, v in values
        )  # fmt: skip
        twin_on_front = any(values[other] == (workers, value) for other in front)
        assert twin_on_front != is_beaten
        assert not (index in front and is_beaten)
    assert [values[index][0] for index in front] == sorted({values[index][0] for index in front})


def test_each_shape_has_its_own_highest_rate() -> None:
    points = [point(1, 1, 1.0, 1.0), point(1, 1, 0.8, 2.0), point(2, 2, 1.0, 1.0), point(2, 2, 1.0, 2.0)]
    assert highest_rates(points) == {(1, 1): pytest.approx(1.5), (2, 2): 2.0}
