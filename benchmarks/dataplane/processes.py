"""Starts the measured processes, each pinned to a core, and reads the CPU time that they take."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import psutil

from benchmarks.child_process import ChildProcess
from benchmarks.dataplane.program import Role


class MeasuredProcess(ChildProcess):
    """`endpoint` is the first line of the process: the id and the address of its service."""

    def __init__(self, role: Role) -> None:
        self.role = role
        super().__init__(role.name, [sys.executable, "-m", "benchmarks.dataplane.program"])
        self._counted = psutil.Process(self.process_id)
        self.endpoint: dict[str, str] = self.ask(asdict(role))

    @property
    def address(self) -> str:
        return self.endpoint["address"]

    def follow(self, workers: list[MeasuredProcess]) -> None:
        """For a router: these are the workers of the fleet."""
        self.ask({"workers": [worker.endpoint for worker in workers]})

    def step_times(self) -> dict[str, float]:
        """For a worker: seconds in steps and between steps, since the start."""
        found: dict[str, float] = self.ask({"stats": True})
        return found

    def cpu_s(self) -> float:
        times = self._counted.cpu_times()
        return float(times.user + times.system)

    def resident_mb(self) -> float:
        return float(self._counted.memory_info().rss) / (1 << 20)


@contextlib.contextmanager
def running(*roles: Role) -> Iterator[list[MeasuredProcess]]:
    with contextlib.ExitStack() as stack:

        def start(role: Role) -> MeasuredProcess:
            process = MeasuredProcess(role)
            stack.callback(process.stop)
            return process

        yield [start(role) for role in roles]


def cores() -> tuple[int, int]:
    """The core of the measured process, and the core of everything else; the same on a machine with one core."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]
