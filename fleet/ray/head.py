"""A Ray that `tandem serve` starts on this machine, kept by a small child process.

Ray starts each of its processes by a fork that runs Python before it executes the new program. In a process that
already has threads of gRPC, UCX or torch, such a fork can meet a lock that no thread will release, and the start hangs.
So a child without threads (`fleet/ray/starter.py`) starts Ray; the child itself is executed without such a fork.

No process outlives the parent, however the parent ends. The kernel closes the standard input of the child when the
parent is gone (also after `kill -9`). The child then kills every process below itself: the processes of Ray, which
would notice after up to a minute, and the actors. The child adopts processes whose own parent died first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil

STARTER = Path(__file__).with_name("starter.py")
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class RayHead:
    """The side of the parent."""

    def __init__(self, num_processes: int, resources: dict[str, int], object_store_bytes: int) -> None:
        """`num_processes`: processes for actors that Ray starts in advance."""
        options = {
            "num_cpus": num_processes,  # Ray starts as many processes in advance; actors here ask for other resources
            "resources": resources,
            "object_store_memory": object_store_bytes,
        }
        # -P: modules beside that file must not hide others of the same name.
        command = [sys.executable, "-P", str(STARTER), json.dumps(options)]
        # Without a buffer, select() sees every unread line.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def address(self) -> str:
        """host:port of Ray. Call it once. Raises `RuntimeError` when Ray does not start in time."""
        assert self._process.stdout is not None
        answered, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        if not answered:
            raise RuntimeError(f"no answer in {START_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that starts it ended with status {self._process.wait(CLOSE_TIMEOUT_S)}")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["address"]

    async def died(self) -> str:
        """Wait until a process ends that Ray cannot do without, and return its name. Call it after `address`."""
        assert self._process.stdout is not None
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.stdout, told.set)
        try:
            await told.wait()
        finally:
            loop.remove_reader(self._process.stdout)
        line = self._process.stdout.readline()
        return str(json.loads(line)["died"]) if line else "the process that keeps it"

    def close(self) -> None:
        """Kill Ray and every process in it. A second call does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # the child was killed, and ended no process
            _kill_session(self._process.pid)
        self._process.stdout.close()


def _kill_session(session: int) -> None:
    """Kill every process of a session. The child and its descendants share one."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
