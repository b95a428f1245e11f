"""Converts what the supervisor tells operators (core/fleet_control.py) into messages of cluster.proto."""

from __future__ import annotations

from core.errors import InvalidRequest
from core.fleet_control import FleetNote, PlanStatus, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from tandem_client.stubs import cluster_pb2

SERVICE_ROLES = {
    ServiceRole.ROUTER: cluster_pb2.SERVICE_ROLE_ROUTER,
    ServiceRole.PREFILL: cluster_pb2.SERVICE_ROLE_PREFILL,
    ServiceRole.DECODE: cluster_pb2.SERVICE_ROLE_DECODE,
}
SLOT_STATES = {
    SlotState.WAITING: cluster_pb2.SLOT_STATE_WAITING,
    SlotState.PLACING: cluster_pb2.SLOT_STATE_PLACING,
    SlotState.STARTING: cluster_pb2.SLOT_STATE_STARTING,
    SlotState.SERVING: cluster_pb2.SLOT_STATE_SERVING,
    SlotState.SWITCHING: cluster_pb2.SLOT_STATE_SWITCHING,
    SlotState.DRAINING: cluster_pb2.SLOT_STATE_DRAINING,
}


def decode_service_role(wire: cluster_pb2.ServiceRole) -> ServiceRole:
    """Raises `InvalidRequest`."""
    role = next((role for role, found in SERVICE_ROLES.items() if found == wire), None)
    if role is None:
        raise InvalidRequest("role", f"{wire} is not a ServiceRole")
    return role


def encode_slot(slot: SlotStatus) -> cluster_pb2.FleetSlot:
    return cluster_pb2.FleetSlot(
        name=slot.name,
        role=SERVICE_ROLES[slot.role],
        state=SLOT_STATES[slot.state],
        in_state_ms=slot.in_state_s * 1e3,
        reason=slot.reason,
        service_id=slot.service_id,
        machine=slot.machine,
        version=slot.version,
        config_revision=slot.revision,
    )


def encode_planner(planner: PlanStatus) -> cluster_pb2.Planner:
    return cluster_pb2.Planner(
        enabled=planner.enabled,
        pinned=[SERVICE_ROLES[role] for role in planner.pinned],
        plan=planner.plan,
        requests_per_s=planner.rate,
        num_ended=planner.num_ended,
        attainment=planner.attainment,
    )


def encode_note(note: FleetNote) -> cluster_pb2.FleetNote:
    return cluster_pb2.FleetNote(
        number=note.number,
        at_unix_ms=note.at_unix_s * 1e3,
        subject=note.subject,
        what=note.what,
        reason=note.reason,
    )
