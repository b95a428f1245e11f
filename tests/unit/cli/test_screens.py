"""What `tandem explain` shows, the phases of a request, and no text of others that a terminal obeys."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from google.protobuf.descriptor import FieldDescriptor
from rich.console import Console

import cli
from cli.commands import status, trace
from cli.commands.command_options import console as console_of_all_commands
from cli.commands.events import event_line
from cli.commands.explain import MAX_ROWS, candidates_table, explain
from cli.screens.terminal import SHOWN, Terminal
from cli.screens.waterfall import BAR, SLIVER, draw, phases
from core.plain_text import escaped, is_plain
from tandem_client.stubs import cluster_pb2, inference_pb2
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
HOSTILE = (
    "[/x]",
    "[red]a[/red]",
    "[link=http://evil]a[/link]",
    ":bomb:",
    "\x1b[2Jgone",
    "a\r\x9b31m",
    "a\u202eb\u2028c",
    "a\nb",
)


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
@pytest.mark.parametrize("text", HOSTILE)
def test_no_view_obeys_a_text_or_reads_it_as_markup(view: str, text: str) -> None:
    """What a terminal gets, without line ends and spaces at the ends of cells."""
    out = io.StringIO()
    VIEWS[view](Terminal(file=out, width=160, force_terminal=True, color_system=None), text)
    lines = out.getvalue().split("\n")
    assert [line for line in lines if not is_plain(line)] == []
    assert view not in WHOLE or any(escaped(text) in line for line in lines)


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
