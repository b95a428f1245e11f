"""The health of a fleet, for `tandem status`: how many services of each kind are wanted and serve, and what is missing.

A service counts as serving if its router has fresh reports of it: what the supervisor started may be out of reach.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from core.wire_names import short_name
from tandem_client.stubs import cluster_pb2, worker_pb2

SILENT_MS = 3000.0  # a worker without a report for so long is not counted

WORKER_ROLES = {"prefill": worker_pb2.WORKER_ROLE_PREFILL, "decode": worker_pb2.WORKER_ROLE_DECODE}


DOWN_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")  # of a call to a router that does not answer


class Health(IntEnum):
    """The values are exit codes."""

    HEALTHY = 0  # as many services serve as are wanted
    DEGRADED = 1
    DOWN = 2  # decode workers are wanted, and none serves; or no router answers


@dataclass(frozen=True, slots=True)
class Pool:
    """The services of one kind."""

    wanted: int
    serving: int
    states: Mapping[str, int]  # of the slots that do not serve -> number

    @property
    def lacking(self) -> int:
        return max(0, self.wanted - self.serving)


def pools_of(fleet: cluster_pb2.GetFleetResponse) -> dict[str, Pool]:
    wanted = {"router": fleet.wanted_routers, "prefill": fleet.wanted_prefill, "decode": fleet.wanted_decode}
    serving = {role: _num_reporting(fleet, number) for role, number in WORKER_ROLES.items()}
    serving["router"] = sum(router.state == worker_pb2.WORKER_STATE_SERVING for router in fleet.routers)
    states: defaultdict[str, Counter[str]] = defaultdict(Counter)  # a later version may have further roles
    for slot in fleet.slots:
        if slot.state != cluster_pb2.SLOT_STATE_SERVING:
            states[role_name(slot)][state_name(slot)] += 1
    return {role: Pool(wanted[role], serving[role], states[role]) for role in wanted}


def _num_reporting(fleet: cluster_pb2.GetFleetResponse, role: worker_pb2.WorkerRole) -> int:
    return sum(
        worker.role == role and worker.state == worker_pb2.WORKER_STATE_SERVING and worker.report_age_ms <= SILENT_MS
        for worker in fleet.workers
    )


def role_name(slot: cluster_pb2.FleetSlot) -> str:
    return short_name(cluster_pb2.ServiceRole, slot.role)


def state_name(slot: cluster_pb2.FleetSlot) -> str:
    return short_name(cluster_pb2.SlotState, slot.state)


def health_of(fleet: cluster_pb2.GetFleetResponse) -> Health:
    pools = pools_of(fleet)
    if pools["decode"].wanted and not pools["decode"].serving:
        return Health.DOWN
    return Health.DEGRADED if any(pool.lacking for pool in pools.values()) else Health.HEALTHY


def services_without(revision: int, fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """Names of the serving slots with an older config."""
    serving = [slot for slot in fleet.slots if slot.state == cluster_pb2.SLOT_STATE_SERVING]
    return [slot.name for slot in serving if slot.config_revision < revision]


def slot_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """A line for each slot that does not serve, one about a new config, and one if several versions serve."""
    lines = [
        f"{slot.name} {state_name(slot)} for {slot.in_state_ms / 1e3:.0f} s"
        + (f": {slot.reason}" if slot.reason else "")
        for slot in fleet.slots
        if slot.state != cluster_pb2.SLOT_STATE_SERVING
    ]
    if fleet.rolling:
        num_rolled = sum(slot.config_revision == fleet.config_revision for slot in fleet.slots)
        lines.append(f"rolling to config {fleet.config_revision}: {num_rolled} of {len(fleet.slots)} services have it")
    elif late := services_without(fleet.config_revision, fleet):
        lines.append(f"config {fleet.config_revision} is on its way to {', '.join(late)}")
    versions = Counter(slot.version or "unknown" for slot in fleet.slots if slot.service_id)
    if len(versions) > 1:
        lines.append("versions: " + ", ".join(f"{version} ({count})" for version, count in sorted(versions.items())))
    return lines


def status_json(fleet: cluster_pb2.GetFleetResponse) -> str:
    """The fleet as one line of JSON; docs/usage.md lists the keys."""
    pools: dict[str, dict[str, Any]] = {
        role: {"wanted": pool.wanted, "serving": pool.serving}
        | {state: pool.states.get(state, 0) for state in ("starting", "placing", "waiting", "switching", "draining")}
        for role, pool in pools_of(fleet).items()
    }
    versions = {worker.worker_id: worker.protocol_version for worker in fleet.workers}
    slots = [
        {
            "name": slot.name,
            "role": role_name(slot),
            "state": state_name(slot),
            "in_state_s": round(slot.in_state_ms / 1e3, 3),
            "reason": slot.reason,
            "id": slot.service_id,
            "machine": slot.machine,
            "version": slot.version,
            "protocol": versions.get(slot.service_id, 0),
            "config": slot.config_revision,
        }
        for slot in fleet.slots
    ]
    planner = fleet.planner
    return json.dumps(
        {
            "health": health_of(fleet).name.lower(),
            "config": fleet.config_revision,
            "rolling": fleet.rolling,
            "pools": pools,
            "slots": slots,
            "planner": {
                "enabled": planner.enabled,
                "pinned": [short_name(cluster_pb2.ServiceRole, role) for role in planner.pinned],
                "plan": planner.plan,
            },
            "traffic": {
                "requests_per_s": round(planner.requests_per_s, 3),
                "ended": planner.num_ended,
                "attainment": round(planner.attainment, 4),
                "moved": fleet.num_moved,
            },
        }
    )
