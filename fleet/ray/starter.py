"""The program that `RayHead` runs: it starts Ray, prints its address, reports a death, and ends every process in it.

    this process --> gcs_server
                 --> raylet --> its two agents
                            --> processes of actors, some of them started in advance

The API server, the monitor of the autoscaler and the log monitor of a head node are left out: each is an interpreter
that imports Ray, and Tandem asks none of them.

No process restarts gcs_server or raylet. Without them the other processes of Ray end, but only after ten seconds
(raylet) or a minute (gcs_server). This program reports the death at once.

The parent ends everything by closing the standard input of this program, or by dying. Below it no process hears SIGTERM
or SIGHUP: a service manager and a shutdown of the machine send SIGTERM to every process, while the parent drains.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray._private.state import GlobalState

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

REGISTER_TIMEOUT_S = 10.0  # afterwards Ray itself looks on, and reports what is wrong
LOOK_AGAIN_S = 0.01
NOT_STARTED_AGAIN = (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET)

SYSTEM_CONFIG = {
    "enable_worker_prestart": True,  # an actor finds an interpreter that has imported Ray
    "enable_metrics_collection": False,  # no program collects them
    "worker_niceness": 0,  # Ray's default of 15 gives the cores of a serving worker to any other program
}


class BareNode(Node):
    """A head node without an API server."""

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        super().start_raylet(*arguments, **options)
        self._wait_until_registered()

    def _wait_until_registered(self) -> None:
        """Return as soon as the raylet is registered. Ray itself would look only once a second."""
        state, end = GlobalState(), time.monotonic() + REGISTER_TIMEOUT_S
        state._initialize_global_state(services._get_gcs_client_options(self.gcs_address))
        while not state.node_table() and time.monotonic() < end:
            time.sleep(LOOK_AGAIN_S)


def _start(options: dict[str, Any]) -> BareNode:
    """Do what `ray.init` does for a new cluster, without making this process a driver of it."""
    without: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False, "_system_config": dict(SYSTEM_CONFIG)}
    params = RayParams(**options, **without)
    return BareNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)


def _print_answer(answer: dict[str, str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent has died
        print(json.dumps(answer), flush=True)


def _watch(node: BareNode) -> None:
    """Report the first death of gcs_server or raylet. Return when the standard input ends."""
    names = {os.pidfd_open(node.all_processes[name][0].process.pid): name for name in NOT_STARTED_AGAIN}
    dead: list[int] = []
    while sys.stdin.fileno() not in dead:
        dead, _, _ = select.select([sys.stdin.fileno(), *names], [], [])
        if names and sys.stdin.fileno() not in dead:
            _print_answer({"died": names[dead[0]]})
            names = {}


def _kill_descendants() -> None:
    """Kill and reap every descendant, also those that start meanwhile."""
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
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))  # children inherit the mask
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        node = _start(json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the parent reports any failure in one line
        _print_answer({"error": (str(error) or type(error).__name__).splitlines()[0]})
    else:
        _print_answer({"address": node.address})
        _watch(node)
    _kill_descendants()


if __name__ == "__main__":
    main()
