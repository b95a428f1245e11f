"""Runs independent simulations on several cores, and counts the requests that have ended in all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol, TypeVar

POLL_S = 0.2

T = TypeVar("T", covariant=True)
CountEnded = Callable[[int], None]  # takes the number of ended requests of one task, which never falls


class Task(Protocol[T]):
    """Can be pickled, as can its result."""

    def run(self, on_progress: CountEnded) -> T: ...


_num_ended: Synchronized[int]  # requests of all processes


def _share(num_ended: Synchronized[int]) -> None:
    global _num_ended
    _num_ended = num_ended


def _run(task: Task[T]) -> T:
    num_counted = 0

    def count(num_ended: int) -> None:
        nonlocal num_counted
        with _num_ended.get_lock():
            _num_ended.value += num_ended - num_counted
        num_counted = num_ended

    return task.run(count)


def run_all(tasks: Sequence[Task[T]], num_processes: int, on_progress: CountEnded) -> list[T]:
    """The results in the order of the tasks. `on_progress` gets the number of ended requests of all tasks.

    The first error of a task ends the others, and is raised.
    """
    num_processes = min(num_processes, len(tasks))
    if num_processes <= 1:
        return _run_here(tasks, on_progress)
    num_ended = multiprocessing.Value("q", 0)
    with ProcessPoolExecutor(num_processes, initializer=_share, initargs=(num_ended,)) as pool:
        results: list[Future[T]] = [pool.submit(_run, task) for task in tasks]
        try:
            left = set(results)
            while left:
                done, left = wait(left, POLL_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                on_progress(num_ended.value)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in results]


def _run_here(tasks: Sequence[Task[T]], on_progress: CountEnded) -> list[T]:
    results, num_before = [], 0
    for task in tasks:
        num_ended = 0

        def count(ended: int, num_before: int = num_before) -> None:
            nonlocal num_ended
            num_ended = ended
            on_progress(num_before + ended)

        results.append(task.run(count))
        num_before += num_ended
    return results
