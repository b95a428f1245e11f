"""Many simulations: in several processes, over a grid, and the command that replays a failed seed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import __main__ as simulator_command
from simulator.processes import CountEnded, run_all
from simulator.replay.sweep import Axis, Point, grid, highest_rates, pareto_front


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
    tasks = [Counting(number) for number in (5, 1, 4)]
    assert run_all(tasks, num_processes, seen.append) == [25, 1, 16]
    assert seen[-1] == 10
    assert seen == sorted(seen)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_of_a_task_is_raised(num_processes: int) -> None:
    with pytest.raises(ValueError, match="task 1"):
        run_all([Counting(0), Counting(1, fails=True), Counting(2)], num_processes, lambda _: None)


def point(num_prefill: int, num_decode: int, attainment: float, rate: float = 2.0) -> Point:
    return Point(num_prefill, num_decode, rate, attainment, goodput=attainment * rate)


def test_a_grid_has_every_combination() -> None:
    assert grid([Axis("prefill", (1, 2)), Axis("rate", (3.0, 4.0))]) == [
        {"prefill": 1, "rate": 3.0},
        {"prefill": 1, "rate": 4.0},
        {"prefill": 2, "rate": 3.0},
        {"prefill": 2, "rate": 4.0},
    ]


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
