"""Lines of text about the pools: their sizes, and how requests are served if one is empty."""

from __future__ import annotations

from collections.abc import Sequence

from core.lifecycle import ServiceRole
from core.service import PoolSizes
from core.wire_names import short_name
from tandem_client.stubs import cluster_pb2, worker_pb2

NO_DECODE = "the decode pool is empty; `tandem scale --decode 1` adds a worker"
NO_PREFILL = "decode workers compute the prompts"


def num_serving(fleet: cluster_pb2.GetFleetResponse, role: worker_pb2.WorkerRole) -> int:
    return sum(w.role == role and w.state == worker_pb2.WORKER_STATE_SERVING for w in fleet.workers)


def pool_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """One line if a pool has no serving worker; none if requests go through both pools."""
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_DECODE):
        if fleet.wanted_decode:
            return ["no decode worker serves yet: requests wait"]
        if fleet.planner.enabled and cluster_pb2.SERVICE_ROLE_DECODE not in fleet.planner.pinned:
            return ["no decode worker serves: the next request brings some"]
        return [f"no request is served: {NO_DECODE}"]
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_PREFILL):
        return [f"no prefill worker serves: {NO_PREFILL}"]
    return []


def traffic_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """The traffic of the newest minutes, and what the planner makes of it."""
    planner, lines = fleet.planner, []
    if planner.num_ended:
        moved = f", {fleet.num_moved} sequences moved since the start" if fleet.num_moved else ""
        lines.append(
            f"{planner.requests_per_s:.3g} requests/s; {planner.attainment:.0%} of {planner.num_ended} within the "
            f"wanted times in 5 minutes{moved}"
        )
    if planner.enabled:
        pinned = " and ".join(short_name(cluster_pb2.ServiceRole, role) for role in planner.pinned)
        held = f" ({pinned} pinned; `tandem scale --auto` releases)" if pinned else ""
        lines.append(f"planner: {planner.plan}{held}")
    return lines


def sizes_text(prefill: int, decode: int, routers: int) -> str:
    """The sizes of a fleet. A single router is not mentioned."""
    return f"{prefill} prefill, {decode} decode" + (f", {routers} routers" if routers > 1 else "")


def ready_line(model: str, addresses: Sequence[str], wanted: PoolSizes) -> str:
    """The line that `tandem serve` prints when every wanted service serves. `addresses` of the routers."""
    where, end = ", ".join(addresses), "; Ctrl-C drains and stops"
    num_prefill, num_decode = wanted[ServiceRole.PREFILL], wanted[ServiceRole.DECODE]
    sizes_shown = sizes_text(num_prefill, num_decode, wanted[ServiceRole.ROUTER])
    if not num_decode:
        return f"no request is served at {where} ({sizes_shown}): {NO_DECODE}{end}"
    note = "" if num_prefill else f": {NO_PREFILL}"
    return f"serving {model} at {where} ({sizes_shown}){note}{end}"
