"""The program that `RayHead` runs: start a Ray, say where it answers, and end it with all that runs in it.

    this process --> gcs_server
                 --> raylet --> its two agents
                            --> actors' processes, the first of them before anybody asks for one

Of a head node's processes, the API server, the autoscaler's monitor and the log monitor are left out: each is an
interpreter that imports Ray, and nothing here asks any of them.

Whoever runs this closes its standard input, or dies, to end everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.state import GlobalState

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

REGISTER_TIMEOUT_S = 10.0  # then Ray goes on looking, and says what is wrong
LOOK_AGAIN_S = 0.01

SYSTEM_CONFIG = {
    "enable_worker_prestart": True,  # interpreters that have imported Ray by the time an actor is wanted
    "enable_metrics_collection": False,  # nobody collects them
}


class BareNode(Node):
    """A head node without an API server."""

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        super().start_raylet(*arguments, **options)
        self._wait_until_registered()

    def _wait_until_registered(self) -> None:
        """Ray itself looks twice, a second apart."""
        state, end = GlobalState(), time.monotonic() + REGISTER_TIMEOUT_S
        state._initialize_global_state(services._get_gcs_client_options(self.gcs_address))
        while not state.node_table() and time.monotonic() < end:
            time.sleep(LOOK_AGAIN_S)


def _start(options: dict[str, Any]) -> str:
    """What `ray.init` does for a cluster of its own, without making this process one of its drivers."""
    without: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False, "_system_config": dict(SYSTEM_CONFIG)}
    params = RayParams(**options, **without)
    node = BareNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
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
