"""A Ray of our own on this machine, kept by a small process of its own.

Ray starts each of its processes by a fork that runs Python before it executes the new program. In a process that
already has threads of gRPC, UCX or torch such a fork can meet a lock that nobody will open again, and the start hangs.
So a child with no thread yet starts them; the child itself is executed without such a fork.

Nothing outlives the parent, however it ends. The child waits for the end of its standard input, which the kernel closes
when the parent is gone (`kill -9` too), and kills every process below itself: Ray's own, which would notice by
themselves after up to a minute, and the actors. It adopts those whose parent died before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
from typing import Any

START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class RayHead:
    """The parent's side."""

    def __init__(self, num_cpus: int | None, resources: dict[str, int], object_store_bytes: int) -> None:
        options = {
            "num_cpus": num_cpus,
            "resources": resources,
            "object_store_memory": object_store_bytes,
            "include_dashboard": False,
        }
        # -P: the directory of this file holds modules whose names must not hide others.
        command = [sys.executable, "-P", __file__, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
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
        self._process.stdout.close()


def _start(options: dict[str, Any]) -> str:
    """What `ray.init` does for a cluster of its own, without making this process one of its drivers."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    node = Node(RayParams(**options), head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    address: str = node.address
    return address


def _kill_descendants() -> None:
    """Kill and reap: one dead process less each time, so what was started meanwhile is found as well."""
    import psutil

    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        answer = {"address": _start(json.loads(sys.argv[1]))}
    except Exception as error:  # noqa: BLE001  whatever it is, the parent says it in one line
        answer = {"error": (str(error) or type(error).__name__).splitlines()[0]}
    with contextlib.suppress(BrokenPipeError):  # the parent died while Ray started
        print(json.dumps(answer), flush=True)
    if "address" in answer:
        sys.stdin.read()
    _kill_descendants()


if __name__ == "__main__":
    main()
