"""The program that `RayHead` runs: start a Ray, say where it answers, and end it with all that runs in it.

    this process --> gcs_server
                 --> raylet --> two stand-ins for its agents
                            --> actors' processes, the first of them before anybody asks for one

Of Ray's own processes only these two are started. Dashboard, autoscaler, log monitor and the raylet's agents (one for
the dashboard, one for runtime environments) are interpreters that import Ray each: together they took 2.3 of a start's
CPU seconds, the raylet waited for them, and nothing here asks any of them. It insists on its agents, though, and ends
when one of them does, so it gets processes that sleep.

Whoever runs this closes its standard input, or dies, to end everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from typing import Any

import ray._raylet
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.state import GlobalState

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

REGISTER_TIMEOUT_S = 10.0  # then Ray goes on looking, and says what is wrong
LOOK_AGAIN_S = 0.01

STAND_IN = 'sh -c "exec sleep infinity"'  # whatever arguments the raylet adds
AGENT_COMMANDS = ("--dashboard_agent_command", "--runtime_env_agent_command")
raylet: Any = ray._raylet  # it has no types
AGENT_PORTS = {
    "metrics_agent_port": raylet.METRICS_AGENT_PORT_NAME,
    "metrics_export_port": raylet.METRICS_EXPORT_PORT_NAME,
    "dashboard_agent_listen_port": raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    "runtime_env_agent_port": raylet.RUNTIME_ENV_AGENT_PORT_NAME,
}
SYSTEM_CONFIG = {
    "enable_worker_prestart": True,  # interpreters that have imported Ray by the time an actor is wanted
    "enable_metrics_collection": False,  # nobody collects them
}


class BareNode(Node):
    """A head node with nothing but a GCS and a raylet."""

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for option, name in AGENT_PORTS.items():  # where the raylet waits for its agents to say that they are up
            port = getattr(self._ray_params, option)
            raylet.persist_port(self._session_dir, self._node_id, name, port)
        super().start_raylet(*arguments, **options)
        self._wait_until_registered()

    def _wait_until_registered(self) -> None:
        """Ray itself looks twice, a second apart."""
        state, end = GlobalState(), time.monotonic() + REGISTER_TIMEOUT_S
        state._initialize_global_state(services._get_gcs_client_options(self.gcs_address))
        while not state.node_table() and time.monotonic() < end:
            time.sleep(LOOK_AGAIN_S)


def _start_process(command: list[str], process_type: str, **options: Any) -> Any:
    """In the place of Ray's function of that name."""
    if process_type == ray_constants.PROCESS_TYPE_RAYLET:
        names = [argument.partition("=")[0] for argument in command]
        command = [
            f"{name}={STAND_IN}" if name in AGENT_COMMANDS else argument
            for name, argument in zip(names, command, strict=True)
        ]
    return _start_ray_process(command, process_type, **options)


_start_ray_process = services.start_ray_process


def _start(options: dict[str, Any], agent_ports: dict[str, Any]) -> str:
    """What `ray.init` does for a cluster of its own, without making this process one of its drivers."""
    patched: Any = services
    patched.start_ray_process = _start_process
    without: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False, "_system_config": dict(SYSTEM_CONFIG)}
    params = RayParams(**options, **without, **agent_ports)
    node = BareNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    address: str = node.address
    return address


def _keep_ports(names: list[str]) -> tuple[dict[str, Any], list[socket.socket]]:
    """Ports at which nobody will ever answer: bound, and never listened at."""
    kept = [socket.socket() for _ in names]
    for holder in kept:
        holder.bind(("", 0))
    return {name: holder.getsockname()[1] for name, holder in zip(names, kept, strict=True)}, kept


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
    agent_ports, kept = _keep_ports(list(AGENT_PORTS))
    try:
        answer = {"address": _start(json.loads(sys.argv[1]), agent_ports)}
    except Exception as error:  # noqa: BLE001  whatever it is, the parent says it in one line
        answer = {"error": (str(error) or type(error).__name__).splitlines()[0]}
    with contextlib.suppress(BrokenPipeError):  # the parent died while Ray started
        print(json.dumps(answer), flush=True)
    if "address" in answer:
        sys.stdin.read()
    _kill_descendants()
    del kept


if __name__ == "__main__":
    main()
