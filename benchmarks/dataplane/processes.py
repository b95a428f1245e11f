"""Starts the measured processes, each pinned to a core."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import psutil

from benchmarks.dataplane.program import Role
from benchmarks.processes import ChildProcess


class MeasuredProcess(ChildProcess):
    """`endpoint`: the id and the address of its service."""

    def __init__(self, role: Role) -> None:
        self.role = role
        command = [sys.executable, "-m", "benchmarks.dataplane.program", json.dumps(asdict(role))]
        super().__init__(role.name, command, core=role.core)
        self.endpoint: dict[str, str] = self.call("endpoint")

    @property
    def address(self) -> str:
        return self.endpoint["address"]

    def follow(self, workers: list[MeasuredProcess]) -> None:
        """For a router: these are the workers of the fleet."""
        self.call("follow", workers=[worker.endpoint for worker in workers])

    def step_times(self) -> dict[str, float]:
        """For a worker: seconds in steps and between steps, since the start."""
        found: dict[str, float] = self.call("step_times")
        return found

    def resident_mb(self) -> float:
        return float(psutil.Process(self.process_id).memory_info().rss) / (1 << 20)


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
