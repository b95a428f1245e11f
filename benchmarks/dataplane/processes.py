"""Starts the measured processes, each pinned to a core, and reads the CPU time that they take."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil

from benchmarks.dataplane.program import Role

STOP_TIMEOUT_S = 20.0


class ProcessEnded(Exception):
    """A measured process ended; the message has the last lines of its output."""


class MeasuredProcess:
    """`endpoint` is the first line of the process: the id and the address of its service."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dataplane.program"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._counted = psutil.Process(self._process.pid)
        self.endpoint: dict[str, str] = self._call(asdict(role))

    @property
    def address(self) -> str:
        return self.endpoint["address"]

    @property
    def process_id(self) -> int:
        return self._process.pid

    def follow(self, workers: list[MeasuredProcess]) -> None:
        """For a router: these are the workers of the fleet."""
        self._call({"workers": [worker.endpoint for worker in workers]})

    def step_times(self) -> dict[str, float]:
        """For a worker: seconds in steps and between steps, since the start."""
        found: dict[str, float] = self._call({"stats": True})
        return found

    def cpu_s(self) -> float:
        times = self._counted.cpu_times()
        return float(times.user + times.system)

    def resident_mb(self) -> float:
        return float(self._counted.memory_info().rss) / (1 << 20)

    def _call(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise ProcessEnded(f"{self.role.name}: " + " | ".join(self._log.read().strip().splitlines()[-5:]))
        return json.loads(line)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


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
