"""What `tandem explain` and `tandem status` show, the phases of a request, and no text that a terminal obeys."""

from __future__ import annotations

import ast
import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from google.protobuf.descriptor import FieldDescriptor
from rich.console import Console
from rich.table import Table

import cli
from cli.commands import status, trace
from cli.commands.command_options import console as console_of_all_commands
from cli.commands.events import event_line
from cli.commands.explain import MAX_ROWS, candidates_table, explain
from cli.commands.status import Sample, fleet_table, holders_table, rates
from cli.screens.fleet_health import SILENT_MS, Health, health_of, slot_lines, status_json
from cli.screens.path_lines import path_lines
from cli.screens.pool_lines import NO_DECODE, pool_lines, ready_line, traffic_lines
from cli.screens.terminal import SHOWN, Terminal
from cli.screens.waterfall import BAR, SLIVER, draw, phases
from core.errors import InvalidRequest
from core.fleet_control import FleetNote, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.plain_text import escaped, is_plain
from protos.fleet_codec import SERVICE_ROLES, SLOT_STATES, encode_note, encode_slot
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2
from tandem_client.stubs.cluster_pb2 import Candidate, ExplainResponse
from tests.unit.cli.conftest import connection_to

PAIR = Candidate(
    prefill_worker="prefill-0.0123456789abcdef", decode_worker="decode-1.0123456789abcdef", cached_tokens=64,
    uncached_tokens=16, queue_ms=12.34, prefill_ms=20.5, transfer_ms=3.25, room_wait_ms=1500.4, gap_ms=1.5,
    num_streams=4, first_token_ms=34.84, cost_ms=1542.5, chosen=True,
)  # fmt: skip
ALONE = Candidate(decode_worker="decode-1.0123456789abcdef", uncached_tokens=80, prefill_ms=80.5, cost_ms=1600.0)


def router(*candidates: Candidate) -> Mock:
    """It explains every request in the same way."""
    explained = ExplainResponse(
        prompt_tokens=80, candidates=candidates, reason="the [lowest] predicted cost",
        path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
    )  # fmt: skip
    return Mock(explain=AsyncMock(return_value=explained))


async def lines_of(*candidates: Candidate, width: int = 200, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    await explain(connection_to(router(*candidates)), inference_pb2.GenerateRequest(), console, as_json=False)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "terminal"), [(200, True), (80, True), (40, False)])
async def test_the_table_has_every_term_of_each_candidate_the_cheapest_first_and_then_the_reason(
    width: int, terminal: bool
) -> None:
    """A star marks the chosen candidate, which is not the cheapest in a near tie."""
    cheaper = Candidate(decode_worker="decode-7.0123456789abcdef", cost_ms=1542.0)
    lines = await lines_of(PAIR, ALONE, cheaper, width=width, terminal=terminal)
    assert lines[0] == "80 prompt tokens · disaggregated · times in ms"
    assert "prefill decode cached new queue prefill transfer room gap first cost" in lines
    assert [line for line in lines if "decode-" in line] == [
        "- decode-7 0 0 0.0 0.0 0.0 0.0 0.0 x 0 0.0 1542",
        "* prefill-0 decode-1 64 16 12.3 20.5 3.2 1500 1.5 x 4 34.8 1542",
        "- decode-1 0 80 0.0 80.5 0.0 0.0 0.0 x 0 0.0 1600",
    ]
    assert lines[-1] == "the [lowest] predicted cost"


async def test_evictions_and_reads_have_columns_where_there_are_any() -> None:
    reading = Candidate(decode_worker="decode-2.0", source="prefill-1.0", read_ms=7.5)
    assert "prefill decode cached new queue prefill transfer room gap first cost read" in await lines_of(reading)
    reading = Candidate(decode_worker="decode-2.0", evict_ms=4.0, source="prefill-1.0", read_ms=7.5, cost_ms=20.0)
    lines = await lines_of(reading, ALONE)
    assert "prefill decode cached new queue prefill transfer room gap first cost evict read" in lines
    assert [line for line in lines if "decode-" in line] == [
        "- decode-2 0 0 0.0 0.0 0.0 0.0 0.0 x 0 0.0 20.0 4.0 prefill-1 7.5",
        "- decode-1 0 80 0.0 80.5 0.0 0.0 0.0 x 0 0.0 1600 0.0 -",
    ]


async def test_of_many_candidates_the_cheapest_are_shown_and_the_others_counted() -> None:
    many = [Candidate(decode_worker=f"decode-{cost}.0123456789abcdef", cost_ms=cost) for cost in range(MAX_ROWS + 5)]
    lines = await lines_of(*reversed(many))
    assert "and 5 more, which --json lists" in lines
    assert [line.split()[1] for line in lines if "decode-" in line] == [f"decode-{cost}" for cost in range(MAX_ROWS)]


async def test_json_has_the_whole_message_on_one_line_zeros_too(capsys: pytest.CaptureFixture[str]) -> None:
    await explain(connection_to(router(PAIR, ALONE)), inference_pb2.GenerateRequest(), Console(), as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    explained = json.loads(line)
    assert explained["prompt_tokens"] == 80
    assert explained["path"] == "REQUEST_PATH_DISAGGREGATED"
    assert explained["candidates"][0]["room_wait_ms"] == 1500.4
    assert explained["candidates"][1]["queue_ms"] == 0.0
    assert {field.name for field in Candidate.DESCRIPTOR.fields} == explained["candidates"][1].keys()


TIMINGS = inference_pb2.PhaseTimings(
    tokenize_ms=2, router_queue_ms=4, prefill_queue_ms=4, prefill_ms=80, first_token_ms=95, transfer_ms=70,
    transfer_exposed_ms=10, decode_ms=105, total_ms=200,
)  # fmt: skip


def test_bars_share_one_axis_and_every_line_has_the_same_width() -> None:
    lines = dict(zip([phase.name for phase in phases(TIMINGS)], draw(TIMINGS, width=40), strict=True))
    assert len({len(line) for line in lines.values()}) == 1
    assert lines["prefill"].count(BAR) == 16
    assert lines["decode"].count(BAR) == 21
    assert lines["decode"].index(BAR) > lines["prefill"].index(BAR)


def test_a_phase_shorter_than_a_column_has_a_thin_mark_and_an_absent_phase_has_none() -> None:
    timings = inference_pb2.PhaseTimings(tokenize_ms=0.01, prefill_ms=100, total_ms=1000)
    lines = dict(zip([phase.name for phase in phases(timings)], draw(timings), strict=True))
    assert SLIVER in lines["tokenize"]
    assert SLIVER not in lines["transfer"]
    assert BAR not in lines["transfer"]
    assert len(draw(inference_pb2.PhaseTimings())) == 6, "a request of no duration"


# ---- no text of a client or of another machine is obeyed by the terminal of an operator

CLI = Path(cli.__file__).parent
MARKUP = ("[/x]", "[red]a[/red]", "[link=http://evil]a[/link]", ":bomb:")
CONTROL = ("\x1b[2Jgone", "a\r\x9b31m", "a\u202eb\u2028c", "a\nb")


def filled(message: Any, text: str) -> Any:
    """`message` with `text` in every text that it has, at every depth."""
    for field in message.DESCRIPTOR.fields:
        part = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            part[text] = text
        elif field.message_type is not None:
            filled(part.add() if field.is_repeated else part, text)
        elif field.type == FieldDescriptor.TYPE_STRING and field.is_repeated:
            part.append(text)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_ENUM) and not field.is_repeated:
            setattr(message, field.name, text if field.enum_type is None else field.enum_type.values[1].number)
    return message


def _status(text: str) -> object:
    fleet, ledger = filled(cluster_pb2.GetFleetResponse(), text), filled(cluster_pb2.GetLedgerResponse(), text)
    return status._view(None, status.Sample(fleet, 0.0, ledger))


WHOLE = {  # the others shorten ids
    "trace": lambda console, text: trace.show_trace(filled(cluster_pb2.Trace(), text), True, console),
    "list": lambda console, text: trace.show_list([filled(cluster_pb2.RequestSummary(), text)], console),
    "event": lambda console, text: console.print(
        event_line(filled(cluster_pb2.FleetNote(), text)), highlight=False, markup=False, soft_wrap=True
    ),
}
VIEWS = WHOLE | {
    "status": lambda console, text: console.print(_status(text)),
    "explain": lambda console, text: console.print(candidates_table(filled(ExplainResponse(), text))),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("text", MARKUP + CONTROL)
def test_no_view_obeys_a_text_or_reads_it_as_markup(view: str, text: str) -> None:
    out = io.StringIO()
    VIEWS[view](Terminal(file=out, width=160, force_terminal=True, color_system=None), text)
    lines = out.getvalue().split("\n")
    assert [line for line in lines if not is_plain(line)] == []
    assert view not in WHOLE or any(escaped(text) in line for line in lines)


def test_a_trace_begins_with_its_end_and_nests_the_spans_of_each_attempt_below_their_roots() -> None:
    def span(name: str, **attributes: str) -> cluster_pb2.Span:
        return cluster_pb2.Span(name=name, attributes={f"tandem.{key}": value for key, value in attributes.items()})

    found = cluster_pb2.Trace(
        requests=[cluster_pb2.RequestSummary(request_id="r1", end="cancelled", total_ms=12.0, trace_id="t1")],
        spans=[
            span("gateway.request"), span("tandem.request"), span("decode_worker.decode", attempt="2"),
            span("router.attempt", attempt="1"), span("router.attempt", attempt="2"),
        ],
    )  # fmt: skip
    out = io.StringIO()
    trace.show_trace(found, False, Terminal(file=out, width=120))
    title, *lines = out.getvalue().splitlines()
    assert title == "r1  cancelled  12.0 ms  trace t1"
    assert [line[: trace.NAME_WIDTH].rstrip() for line in lines] == [
        "gateway.request", "  tandem.request", "    router.attempt", "    router.attempt", "      decode_worker.decode",
    ]  # fmt: skip


def test_every_command_prints_on_this_console() -> None:
    assert isinstance(console_of_all_commands, Terminal)
    makes = {
        path.name
        for path in CLI.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
    }
    assert makes == set()


def test_languages_and_emoji_keep_the_characters_that_join_them() -> None:
    for text in ("می\u200cروم", "👩\u200d👩\u200d👧", "a\u00a0b\u3000c", "שלום\u200f"):
        assert escaped(text) == text
    assert escaped("\x1b\n\t\udc80", SHOWN) == "\\x1b\n\t\\udc80"


# ---- What `tandem status` shows: tables, lines, JSON and health of a fleet. `tandem events` and `tandem scale`.

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


def test_a_terminal_of_no_width_shows_its_lines_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    out = io.StringIO()
    Terminal(file=out).print("one line")
    assert out.getvalue() == "one line\n"


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
