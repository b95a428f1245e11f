"""`tandem gateway` as a measured program: its processes, pinned to cores."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import psutil

from benchmarks.tandem_serve import serving

PORT = 18_421


@contextlib.contextmanager
def gateway(router: str, cores: Sequence[int]) -> Iterator[list[psutil.Process]]:
    """A gateway with one process for each of `cores`. Yields the processes that serve."""
    command = [
        sys.executable, "-m", "cli.main", "gateway", "--router", router, "--http", str(PORT),
        "--http-processes", str(len(cores)),
    ]  # fmt: skip
    with serving(command) as process_id:
        children = psutil.Process(process_id).children()
        for child, core in zip(children, cores, strict=True):
            child.cpu_affinity([core])
            for thread in child.threads():  # of gRPC
                psutil.Process(thread.id).cpu_affinity([core])
        yield children


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
