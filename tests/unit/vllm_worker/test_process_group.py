"""The guardian kills the processes of vLLM when their worker dies, and removes their sockets."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from tests.support.waiting import until

# A worker with a child, which has a child of its own.
WORKER = """
import pathlib, subprocess, sys
from vllm_worker.process_group import Guardian
guardian = Guardian()
pathlib.Path(guardian.sockets, "kv-events").touch()
child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), guardian.sockets, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [subprocess.Popen.kill, lambda worker: worker.stdin.close()], ids=["killed", "returns"])
async def test_children_end_with_their_worker(end: Callable[[subprocess.Popen[str]], None]) -> None:
    command = [sys.executable, "-c", WORKER]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert worker.stdin is not None
    assert worker.stdout is not None
    *pids, sockets = worker.stdout.readline().split()
    family = [psutil.Process(int(pid)) for pid in pids]
    guardians = [one for one in psutil.Process(worker.pid).children() if one not in family]
    assert len(family) == 2
    assert stat.S_IMODE(os.stat(sockets).st_mode) == 0o700
    assert all(one.is_running() for one in family)
    end(worker)
    await until(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in (*family, *guardians)),
        "processes of the group still run",
    )
    assert not os.access(sockets, os.F_OK)
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
