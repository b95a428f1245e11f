"""No process of a Ray outlives RayHead, also if the child process that keeps Ray was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from fleet.ray.head import RayHead

# Prints the process id of its child in place of an address.
STARTER = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)
print(json.dumps({"address": str(child.pid)}), flush=True)
sys.stdin.read()
child.kill()
"""
PATIENCE_S = 10.0


@pytest.mark.parametrize("is_killed", [False, True])
def test_close_ends_the_processes_of_the_starter_also_if_the_starter_was_killed(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text(STARTER)
    monkeypatch.setattr("fleet.ray.head.STARTER", starter)
    head = RayHead(1, {}, 0)
    child = psutil.Process(int(head.address()))
    if is_killed:
        (keeper,) = [parent for parent in child.parents() if str(starter) in parent.cmdline()]
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
        assert child.is_running(), "the child ended by itself, so this test proves nothing"
    head.close()
    psutil.wait_procs([child], PATIENCE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("then", "name"),
    [
        ('print(json.dumps({"died": "raylet"}), flush=True); sys.stdin.read()', "raylet"),
        ("sys.exit(1)", "the process that keeps it"),
    ],
)
async def test_died_returns_the_name_of_the_dead_process(
    then: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text(f"import json, sys\nprint(json.dumps({{'address': 'here'}}), flush=True)\n{then}\n")
    monkeypatch.setattr("fleet.ray.head.STARTER", starter)
    head = RayHead(1, {}, 0)
    try:
        assert head.address() == "here"
        assert await asyncio.wait_for(head.died(), PATIENCE_S) == name
    finally:
        head.close()
