"""The health of a fleet, its exit codes, and the lines and JSON of `tandem status` about slots."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cli.commands.events import event_line
from cli.screens.fleet_health import SILENT_MS, Health, health_of, slot_lines, status_json
from core.fleet_control import FleetNote, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from protos.fleet_codec import SERVICE_ROLES, SLOT_STATES, encode_note, encode_slot
from tandem_client.stubs import cluster_pb2, worker_pb2

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
ROLES = {P: worker_pb2.WORKER_ROLE_PREFILL, D: worker_pb2.WORKER_ROLE_DECODE}


def worker(role: ServiceRole, state: str = "SERVING", age_ms: float = 10.0) -> cluster_pb2.FleetWorker:
    return cluster_pb2.FleetWorker(
        worker_id=f"{role.value}-0.ab",
        role=ROLES[role],
        state=f"WORKER_STATE_{state}",
        report_age_ms=age_ms,
    )


def fleet(
    *workers: cluster_pb2.FleetWorker, decode: int = 1, slots: tuple[SlotStatus, ...] = ()
) -> cluster_pb2.GetFleetResponse:
    router = cluster_pb2.FleetRouter(router_id="router-0.ab", state=worker_pb2.WORKER_STATE_SERVING)
    return cluster_pb2.GetFleetResponse(
        workers=workers,
        routers=[router],
        wanted_prefill=1,
        wanted_decode=decode,
        wanted_routers=1,
        slots=map(encode_slot, slots),
    )


FLEETS = [
    (fleet(worker(P), worker(D)), Health.HEALTHY),
    (fleet(worker(P), decode=0), Health.HEALTHY),
    (fleet(worker(D)), Health.DEGRADED),
    (fleet(worker(P), worker(D), decode=2), Health.DEGRADED),
    (fleet(worker(P, "DRAINING"), worker(D)), Health.DEGRADED),
    (fleet(worker(P), worker(D, "LOST")), Health.DOWN),
    (fleet(worker(P), worker(D, age_ms=SILENT_MS + 1.0)), Health.DOWN),
    (fleet(worker(P)), Health.DOWN),
]


@pytest.mark.parametrize(("found", "health"), FLEETS)
def test_a_fleet_is_healthy_with_all_wanted_services_and_down_without_a_decode_worker(
    found: cluster_pb2.GetFleetResponse, health: Health
) -> None:
    assert health_of(found) is health
    assert json.loads(status_json(found))["health"] == health.name.lower()


SLOTS = (
    SlotStatus("prefill-0", P, SlotState.SERVING, 60.0, "", "prefill-0.ab", "10.0.0.1", "1.0"),
    SlotStatus("decode-0", D, SlotState.DRAINING, 3.0, "its machine leaves", "decode-0.ab", "10.0.0.2", "1.0"),
    SlotStatus("decode-1", D, SlotState.PLACING, 12.3, "no machine has a free 'decode'"),
    SlotStatus("decode-2", D, SlotState.STARTING, 1.0, machine="10.0.0.3"),
)


def test_each_slot_that_does_not_serve_has_a_line_with_its_reason() -> None:
    assert slot_lines(fleet(slots=SLOTS)) == [
        "decode-0 draining for 3 s: its machine leaves",
        "decode-1 placing for 12 s: no machine has a free 'decode'",
        "decode-2 starting for 1 s",
    ]


def test_a_change_that_a_serving_service_has_not_taken_has_a_line() -> None:
    found = fleet(
        slots=(*(replace(slot, revision=2) for slot in SLOTS), replace(SLOTS[0], name="prefill-1", revision=1))
    )
    found.config_revision = 2
    assert slot_lines(found)[-1] == "config 2 is on its way to prefill-1"


def test_two_versions_side_by_side_have_a_line_and_one_version_has_none() -> None:
    newer = SlotStatus("prefill-1", P, SlotState.SERVING, 1.0, "", "prefill-1.cd", "10.0.0.4", "1.1")
    assert slot_lines(fleet(slots=(*SLOTS, newer)))[-1] == "versions: 1.0 (2), 1.1 (1)"


def test_the_json_counts_the_slots_of_each_pool_by_state_and_lists_them() -> None:
    told = json.loads(status_json(fleet(worker(P), worker(D), decode=2, slots=SLOTS)))
    assert told["pools"]["decode"] == {
        "wanted": 2, "serving": 1, "starting": 1, "placing": 1, "waiting": 0, "switching": 0, "draining": 1,
    }  # fmt: skip
    assert told["slots"][2] == {
        "name": "decode-1", "role": "decode", "state": "placing", "in_state_s": 12.3,
        "reason": "no machine has a free 'decode'", "id": "", "machine": "", "version": "", "protocol": 0, "config": 0,
    }  # fmt: skip


def test_every_role_and_state_has_a_name_on_the_wire() -> None:
    assert {cluster_pb2.ServiceRole.Name(wire) for wire in SERVICE_ROLES.values()} == {
        f"SERVICE_ROLE_{role.name}" for role in ServiceRole
    }
    assert {cluster_pb2.SlotState.Name(wire) for wire in SLOT_STATES.values()} == {
        f"SLOT_STATE_{state.name}" for state in SlotState
    }


def test_an_event_is_one_line_with_its_time_and_its_reason() -> None:
    line = event_line(encode_note(FleetNote(7, 1_800_000_000.25, "decode-1", "drains", "its machine leaves")))
    assert line.startswith("2027-01-1")
    assert line.endswith(":00  decode-1 drains: its machine leaves")
