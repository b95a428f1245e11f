"""No text of a client or of another machine is obeyed by the terminal of an operator."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console

import cli
from cli.commands import status, trace
from cli.commands.command_options import console as console_of_all_commands
from cli.commands.events import event_line
from cli.commands.explain import candidates_table
from cli.screens.terminal import SHOWN, Terminal
from core.plain_text import escaped, is_plain
from tandem_client.stubs import cluster_pb2

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


def filled(message: Message, text: str) -> Message:
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


def shown(show: Callable[[Console], None]) -> str:
    """What a terminal gets, without line ends and spaces at the ends of cells."""
    out = io.StringIO()
    show(Terminal(file=out, width=160, force_terminal=True, color_system=None))
    return out.getvalue()


def _show_trace(console: Console, text: str) -> None:
    found = cluster_pb2.Trace()
    filled(found, text)
    trace.show_trace(found, True, console)


def _show_list(console: Console, text: str) -> None:
    summary = cluster_pb2.RequestSummary()
    filled(summary, text)
    trace.show_list([summary], console)


def _show_status(console: Console, text: str) -> None:
    fleet, ledger = cluster_pb2.GetFleetResponse(), cluster_pb2.GetLedgerResponse()
    filled(fleet, text)
    filled(ledger, text)
    console.print(status._view(None, status.Sample(fleet, 0.0, ledger)))


def _show_event(console: Console, text: str) -> None:
    note = cluster_pb2.FleetNote()
    filled(note, text)
    console.print(event_line(note), highlight=False, markup=False, soft_wrap=True)


def _explain(console: Console, text: str) -> None:
    found = cluster_pb2.ExplainResponse()
    filled(found, text)
    console.print(candidates_table(found))


VIEWS = (_show_trace, _show_list, _show_status, _show_event, _explain)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("text", HOSTILE)
def test_no_view_obeys_a_text_or_reads_it_as_markup(view: Callable[[Console, str], None], text: str) -> None:
    lines = shown(lambda console: view(console, text)).split("\n")
    assert [line for line in lines if not is_plain(line)] == []
    if view in (_show_list, _show_trace, _show_event):  # the others shorten ids
        assert any(escaped(text) in line for line in lines)


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
