"""The machines of a Ray cluster: those that are alive, and those that leave.

SIGTERM to `ray start --block` marks its machine as draining, as do autoscalers and `ray drain-node`. Ray then places
nothing there, and ends the machine when no actor is left, at the latest after RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from core.config import ClusterConfig
from core.errors import WorkerUnavailable
from fleet.law.events import MachineId


def live_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def node_here() -> dict[str, Any]:
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == node_id)


def host_of(node: dict[str, Any], config: ClusterConfig) -> str:
    """The `host` of a `Placement` on this node."""
    return str(node["NodeManagerAddress"]) if config.address else ""


def machine_here(config: ClusterConfig) -> MachineId:
    return machine_of(node_here(), config)


def machine_of(node: dict[str, Any], config: ClusterConfig) -> MachineId:
    return MachineId(str(node["NodeID"]), host_of(node, config))


async def leaving_machines(config: ClusterConfig) -> Mapping[MachineId, float | None]:
    """The machines that drain, with the seconds until they end; None = without a time limit.

    Raises `WorkerUnavailable` while Ray does not answer.
    """
    import ray

    try:
        ends_at_ms: dict[str, int] = await asyncio.to_thread(ray._private.state.state.get_draining_nodes)
        nodes = await asyncio.to_thread(live_nodes) if ends_at_ms else []
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise WorkerUnavailable(f"Ray does not list its machines: {error}") from error
    now_ms = time.time() * 1e3  # Ray gives times of day
    return {
        machine_of(node, config): max(0.0, (end_ms - now_ms) / 1e3) if end_ms else None
        for node in nodes
        if (end_ms := ends_at_ms.get(node["NodeID"])) is not None
    }
