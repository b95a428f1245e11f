"""`tandem events`: what happened to the fleet, with reasons."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.json_format import MessageToJson
from rich.console import Console

from cli.screens.terminal import print_line
from core.plain_text import escaped
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2


def event_line(note: cluster_pb2.FleetNote) -> str:
    """One line, in local time to the second."""
    at = datetime.fromtimestamp(note.at_unix_ms / 1e3).isoformat(sep=" ", timespec="seconds")
    return escaped(f"{at}  {note.subject} {note.what}" + (f": {note.reason}" if note.reason else ""))


async def show_events(connection: AsyncClient, limit: int, as_json: bool, console: Console) -> None:
    """Oldest first. With `as_json`, one line of JSON for each."""
    async with connection as client:
        found = await client.events(limit)
    for note in found.events:
        if as_json:
            print(MessageToJson(note, preserving_proto_field_name=True, indent=None))
        else:
            print_line(console, event_line(note))
