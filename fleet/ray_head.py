"""A Ray of our own on this machine, kept by a small process of its own.

Ray starts each of its processes by a fork that runs Python before it executes the new program. In a process that
already has threads of gRPC, UCX or torch such a fork can meet a lock that nobody will open again, and the start hangs.
So a child with no thread yet starts them (`fleet/ray_starter.py`); the child itself is executed without such a fork.

Nothing outlives the parent, however it ends. The child waits for the end of its standard input, which the kernel closes
when the parent is gone (`kill -9` too), and kills every process below itself: Ray's own, which would notice by
themselves after up to a minute, and the actors. It adopts those whose parent died before.
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

STARTER = Path(__file__).with_name("ray_starter.py")
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class RayHead:
    """The parent's side."""

    def __init__(self, num_processes: int, resources: dict[str, int], object_store_bytes: int) -> None:
        """`num_processes`: for actors, started before anybody asks for them."""
        options = {
            "num_cpus": num_processes,  # what Ray goes by; actors here ask for other resources
            "resources": resources,
            "object_store_memory": object_store_bytes,
        }
        # -P: the directory of that file holds modules whose names must not hide others.
        command = [sys.executable, "-P", str(STARTER), json.dumps(options)]
        # No buffer, so that what is not read yet can be waited for.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def address(self) -> str:
        """host:port where Ray answers; to be asked once. Raises `RuntimeError` where it does not start in time."""
        assert self._process.stdout is not None
        answered, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        if not answered:
            raise RuntimeError(f"no answer in {START_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"its starter ended with status {self._process.wait(CLOSE_TIMEOUT_S)}")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["address"]

    async def died(self) -> str:
        """Waits until Ray can go on no more, and says which of its processes has ended. To be asked after `address`."""
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
        """Kill Ray and all that runs in it. May be called more than once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # it was killed, and could end nothing
            _kill_session(self._process.pid)
        self._process.stdout.close()


def _kill_session(session: int) -> None:
    """Kill every process of a session: all that the starter began is in the one that it was given."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
