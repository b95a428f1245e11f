"""Tasks run in several processes: results in order, progress that adds up, and the first error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from simulator.processes import CountEnded, run_all


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
