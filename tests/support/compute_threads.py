"""Counts the compute threads that torch starts for a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads_started_by(work: Callable[[], object]) -> int:
    """The number of threads that `work` starts from a new thread."""
    started = []

    def watch() -> None:
        before = set(os.listdir("/proc/self/task"))
        work()
        started.append(len(set(os.listdir("/proc/self/task")) - before))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    return started[0]
