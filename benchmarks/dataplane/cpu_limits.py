"""Which core this process runs on, and how much of a core the measured processes may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/cpu")  # version 1, which names a quota and a period in two files
PERIOD_US = 10_000


@contextlib.contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Run this process on `core` inside the `with` block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def can_limit() -> bool:
    try:
        with _group("tandem-bench-probe"):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def limited(process_ids: Sequence[int], share_of_core: float) -> Iterator[None]:
    """Give each process at most `share_of_core` of a core inside the `with` block; 0 changes nothing."""
    with contextlib.ExitStack() as stack:
        for process_id in process_ids if share_of_core else ():
            group = stack.enter_context(_group(f"tandem-bench-{process_id}"))
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(share_of_core * PERIOD_US)))
            (group / "cgroup.procs").write_text(str(process_id))
        yield


@contextlib.contextmanager
def _group(name: str) -> Iterator[Path]:
    group = CGROUPS / name
    group.mkdir()
    try:
        yield group
    finally:
        for process_id in (group / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(process_id)
        group.rmdir()
