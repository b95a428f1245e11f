"""What `tandem status` shows: tables, lines and JSON of a fleet, and its health. `tandem events` and `tandem scale`."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest
from rich.console import Console
from rich.table import Table

from cli.commands import status
from cli.commands.events import event_line
from cli.commands.status import Sample, fleet_table, holders_table, rates
from cli.screens.fleet_health import SILENT_MS, Health, health_of, slot_lines, status_json
from cli.screens.path_lines import path_lines
from cli.screens.pool_lines import NO_DECODE, pool_lines, ready_line, traffic_lines
from cli.screens.terminal import Terminal
from core.errors import InvalidRequest
from core.fleet_control import FleetNote, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from protos.fleet_codec import SERVICE_ROLES, SLOT_STATES, encode_note, encode_slot
from tandem_client.stubs import cluster_pb2, worker_pb2
from tests.unit.cli.conftest import connection_to

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER


def worker(name: str, state: str = "SERVING", age_ms: float = 10.0, tokens: int = 0) -> cluster_pb2.FleetWorker:
    load = worker_pb2.LoadReport(
        num_running=2, num_waiting=1, num_pulls_waiting=4, num_queued_tokens=77, num_prefilled_tokens=tokens,
        num_sampled_tokens=tokens, num_transfers=6,
        ledger=worker_pb2.Ledger(free=50, cached=25, held=20, leased=3, incoming=2),
    )  # fmt: skip
    return cluster_pb2.FleetWorker(
        worker_id=f"{name}.0123456789abcdef", role=f"WORKER_ROLE_{name.partition('-')[0].upper()}", load=load,
        report_age_ms=age_ms, state=f"WORKER_STATE_{state}",
    )  # fmt: skip


PREFILL, DECODE = worker("prefill-0"), worker("decode-0")


def fleet(
    *workers: cluster_pb2.FleetWorker, decode: int = 1, routers: int = 1, slots: tuple[SlotStatus, ...] = ()
) -> cluster_pb2.GetFleetResponse:
    found = cluster_pb2.GetFleetResponse(
        workers=workers, wanted_prefill=1, wanted_decode=decode, wanted_routers=routers, num_in_flight=8, num_queued=9,
        slots=map(encode_slot, slots),
    )  # fmt: skip
    found.routers.add(
        router_id="router-0.1a2b3c4d", state=worker_pb2.WORKER_STATE_SERVING, num_in_flight=8, num_queued=9
    )
    return found


def shown(table: Table, width: int = 110) -> list[str]:
    """The lines of a table, without the widths of its columns."""
    out = io.StringIO()
    Terminal(file=out, width=width).print(table)
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip(" ─━")]


def test_one_router_has_no_row_and_a_worker_has_its_use_its_queue_and_its_speed_or_its_blocks() -> None:
    switched = worker("decode-2")
    switched.role = worker_pb2.WORKER_ROLE_PREFILL
    found = fleet(DECODE, worker("decode-1", age_ms=12_000), switched, decode=3)
    assert shown(fleet_table(found, {"decode-0.0123456789abcdef": 12.34}, False)) == [
        "prefill 1/1 · decode 2/3 · 8 in flight · 9 queued",
        "worker state KV cached run wait todo tok/s moves",
        "decode-2.0123 serving as prefill 25% 25% 2 5 77 - 6",
        "decode-0.0123 serving 25% 25% 2 5 77 12.3 6",
        "decode-1.0123 silent 12 s 25% 25% 2 5 77 - 6",
    ]
    assert shown(fleet_table(found, {}, True))[1::2] == [
        "worker state free cached held leased incoming moves",
        "decode-0.0123 serving 50 25 20 3 2 6",
    ]


def test_each_of_several_routers_has_a_row_and_only_the_answering_one_has_its_load() -> None:
    found = fleet(DECODE, decode=3, routers=3)
    found.routers.add(router_id="router-1.5e6f7a8b", state=worker_pb2.WORKER_STATE_DRAINING)
    lines = shown(fleet_table(found, {}, False))
    assert lines[0] == "routers 1/3 · prefill 0/1 · decode 1/3"
    assert lines[2:4] == ["router-0.1a2b3c4d serving 8 9", "router-1.5e6f7a8b draining - -"]
    assert shown(fleet_table(found, {}, True))[3] == "router-1.5e6f7a8b draining"


async def test_scale_without_a_size_names_its_flags_and_with_auto_needs_none() -> None:
    router, sizes = Mock(), dict.fromkeys(("prefill", "decode", "routers"))
    router.scale = AsyncMock(return_value=cluster_pb2.ScaleResponse(wanted_prefill=1, wanted_decode=1))
    with pytest.raises(InvalidRequest, match="give --prefill, --decode, --routers or --auto"):
        await status.scale(connection_to(router), sizes, False, Console())
    await status.scale(connection_to(router), sizes, True, Console(quiet=True))
    router.scale.assert_awaited_once_with(auto=True, **sizes)


async def test_status_without_a_terminal_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)
    router, out = Mock(fleet=AsyncMock(return_value=fleet(DECODE))), io.StringIO()
    async with asyncio.timeout(5):
        await status.status(connection_to(router), Console(file=out), once=False, with_ledger=False)
    assert router.fleet.await_count == 2
    assert out.getvalue().count("decode-0.0123") == 1


def test_the_status_tells_the_attainment_the_moves_and_the_plan() -> None:
    found = fleet(DECODE)
    assert not traffic_lines(found)
    found.num_moved = 3
    found.planner.MergeFrom(
        cluster_pb2.Planner(
            enabled=True, pinned=[cluster_pb2.SERVICE_ROLE_DECODE], plan="1 prefill, 1 decode for 2 requests/s",
            requests_per_s=2.04, num_ended=600, attainment=0.973,
        )
    )  # fmt: skip
    assert traffic_lines(found) == [
        "2.04 requests/s; 97% of 600 within the wanted times in 5 minutes, 3 sequences moved since the start",
        "planner: 1 prefill, 1 decode for 2 requests/s (decode pinned; `tandem scale --auto` releases)",
    ]


def holder(name: str, kind: str, state: str, blocks: int, counted: int, age_ms: float = 0) -> worker_pb2.BlockHolder:
    return worker_pb2.BlockHolder(
        kind=f"HOLDER_KIND_{kind}", name=name,
        state=f"HOLDER_STATE_{state}", num_blocks=blocks, num_counted=counted,
        age_ms=age_ms, peer="prefill-0.0123456789abcdef" if kind != "SEQUENCE" else "",
    )  # fmt: skip


def test_the_ledger_shows_the_blocks_and_the_age_of_each_holder() -> None:
    holders = [
        holder("router-1.7[0]", "SEQUENCE", "RUNNING", 5, 3, age_ms=12_340),
        holder("0a1b2c3d", "PULL", "READING", 4, 4, age_ms=51),
    ]
    ledger = worker_pb2.DescribeLedgerResponse(holders=holders, num_left_out=9)
    workers = [
        cluster_pb2.WorkerLedger(worker_id="decode-0.0123456789abcdef", ledger=ledger),
        cluster_pb2.WorkerLedger(worker_id="decode-1.0123456789abcdef", error="timed out"),
    ]
    assert shown(holders_table(cluster_pb2.GetLedgerResponse(workers=workers)))[-4:] == [
        "decode-0.0123 sequence router-1.7[0] running 5 3 12.3 s",
        "decode-0.0123 pull 0a1b2c3d reading 4 4 0.1 s prefill-0.0123",
        "decode-0.0123 and 9 more",
        "decode-1.0123 no answer: timed out",
    ]


def test_a_pool_without_a_serving_worker_has_a_line_about_the_consequence() -> None:
    assert pool_lines(fleet(PREFILL, worker("decode-0", "STARTING"))) == ["no decode worker serves yet: requests wait"]
    assert pool_lines(fleet(PREFILL, decode=0)) == [f"no request is served: {NO_DECODE}"]
    assert pool_lines(fleet(DECODE)) == ["no prefill worker serves: decode workers compute the prompts"]
    assert pool_lines(fleet(PREFILL, DECODE)) == []


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 1), "serving m at h:1 (2 prefill, 1 decode); Ctrl-C drains and stops"),
        ((0, 1), "serving m at h:1 (0 prefill, 1 decode): decode workers compute the prompts; Ctrl-C drains and stops"),
        ((1, 0), f"no request is served at h:1 (1 prefill, 0 decode): {NO_DECODE}; Ctrl-C drains and stops"),
        ((1, 1, 2), "serving m at h:1, i:1 (1 prefill, 1 decode, 2 routers); Ctrl-C drains and stops"),
    ],
)
def test_the_ready_line_says_whether_requests_are_served(sizes: tuple[int, ...], line: str) -> None:
    wanted = dict(zip((P, D, R), (*sizes, 1)[:3], strict=True))
    assert ready_line("m", ["h:1", "i:1"] if len(sizes) == 3 else ["h:1"], wanted) == line


def test_a_rate_is_the_difference_of_two_samples_and_needs_both() -> None:
    before = Sample(fleet(worker("decode-0", tokens=100)), at=10.0)
    after = Sample(fleet(worker("decode-0", tokens=150), worker("decode-1", tokens=7)), at=12.0)
    assert rates(before, after) == {"decode-0.0123456789abcdef": 50.0}
    assert rates(None, after) == {}


def test_each_broken_path_has_its_line_and_a_state_of_a_newer_router_has_none() -> None:
    slow = worker_pb2.PathReport(
        peer=PREFILL.worker_id, state=worker_pb2.PATH_STATE_SLOW, lane=worker_pb2.PATH_LANE_TCP, bytes_per_s=1.1e9,
        expected_bytes_per_s=12.5e9, latency_ms=0.31,
    )  # fmt: skip
    reader = worker("decode-0")
    fine = worker_pb2.PathReport(peer=PREFILL.worker_id, state=worker_pb2.PATH_STATE_FINE)
    newer = worker_pb2.PathReport(peer=PREFILL.worker_id, state=99)  # type: ignore[arg-type]
    reader.load.paths.extend([slow, fine, newer])
    assert path_lines(fleet(reader, PREFILL)) == [
        "paths: 1 fine · 1 slow",
        "prefill-0.0123 -> decode-0.0123: slow: TCP, 1.1 GB/s of 12.5, 310 us there and back",
    ]


@pytest.mark.parametrize(
    ("found", "health"),
    [
        (fleet(PREFILL, DECODE), Health.HEALTHY),
        (fleet(PREFILL, decode=0), Health.HEALTHY),
        (fleet(DECODE), Health.DEGRADED),
        (fleet(PREFILL, DECODE, decode=2), Health.DEGRADED),
        (fleet(worker("prefill-0", "DRAINING"), DECODE), Health.DEGRADED),
        (fleet(PREFILL, worker("decode-0", "LOST")), Health.DOWN),
        (fleet(PREFILL, worker("decode-0", age_ms=SILENT_MS + 1.0)), Health.DOWN),
        (fleet(PREFILL), Health.DOWN),
    ],
)
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


def test_each_slot_that_does_not_serve_and_each_late_change_and_two_versions_have_a_line() -> None:
    not_serving = [
        "decode-0 draining for 3 s: its machine leaves",
        "decode-1 placing for 12 s: no machine has a free 'decode'",
        "decode-2 starting for 1 s",
    ]
    assert slot_lines(fleet(slots=SLOTS)) == not_serving
    newer = SlotStatus("prefill-1", P, SlotState.SERVING, 1.0, "", "prefill-1.cd", "10.0.0.4", "1.1")
    assert slot_lines(fleet(slots=(*SLOTS, newer))) == [*not_serving, "versions: 1.0 (2), 1.1 (1)"]
    found = fleet(
        slots=(*(replace(slot, revision=2) for slot in SLOTS), replace(SLOTS[0], name="prefill-1", revision=1))
    )
    found.config_revision = 2
    assert slot_lines(found) == [*not_serving, "config 2 is on its way to prefill-1"]


def test_the_json_counts_the_slots_of_each_pool_by_state_and_lists_them() -> None:
    told = json.loads(status_json(fleet(PREFILL, DECODE, decode=2, slots=SLOTS)))
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
