"""`tandem config` and `tandem apply`: print the config of a fleet, change it, and wait until every service has it."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from rich.console import Console

from cli.commands.events import event_line
from cli.screens.fleet_health import services_without
from cli.screens.terminal import print_line
from core.config import Taken, from_mapping, taken
from core.errors import InvalidRequest, TandemError, WorkerUnavailable
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2

REFRESH_S = 0.02  # while services take a change
PATIENCE_S = 10.0  # for a service that does not
ROLL_REFRESH_S = 1.0  # while services start again
# Limit: `tandem apply` or `role` without an answer of a router, longer than one call; beyond: it ends with an error
GONE_S = 15.0
SILENT_S = 60.0  # `tandem apply` while another router starts: a roll may drain the only one first; beyond: the same
MAX_EVENTS = 1000
_FIRST_LINE = re.compile(r"# Config (\d{1,9}) of the fleet at ", re.ASCII)
_NOT_COMING = {cluster_pb2.SLOT_STATE_SERVING, cluster_pb2.SLOT_STATE_DRAINING}


@dataclass(frozen=True, slots=True)
class Order:
    """As `AsyncClient.apply` takes it."""

    config: str = ""
    options: str = ""
    restart: bool = False
    stop: bool = False
    expected_revision: int = 0


def revision_of(text: str) -> int:
    """The revision that `tandem config` has written into the first line; 0 for a file without it."""
    found = _FIRST_LINE.match(text)
    return int(found[1]) if found is not None else 0


async def show(connection: AsyncClient) -> None:
    async with connection as client:
        found = await client.config()
    print(first_line(found.config_revision, client.address))
    print("\n".join(toml_lines(json.loads(found.config))))


def first_line(revision: int, address: str) -> str:
    return f"# Config {revision} of the fleet at {address}. With this line, `tandem apply` replaces no later config."


def toml_lines(tables: dict[str, Any]) -> Iterator[str]:
    config = from_mapping(tables)
    for table, content in tables.items():
        entries = content if isinstance(content, list) else [content]
        for entry in entries:
            yield f"\n[[{table}]]" if isinstance(content, list) else f"\n[{table}]"
            for option, value in entry.items():
                # The strings, numbers and arrays of the config look the same in JSON and TOML, but for one character.
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
                line = f"{option} = {text}"
                marked = isinstance(content, dict) and taken(config, table, option) is Taken.LIVE
                yield f"{line:<40}  # live" if marked else line


def options_as_json(assignments: Iterable[str]) -> str:
    """From TABLE.OPTION=VALUE; a value that is not TOML is a string. Raises `InvalidRequest`."""
    tables: dict[str, dict[str, object]] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        table, dot, option = name.strip().partition(".")
        if not (separator and dot and table and option):
            raise InvalidRequest("options", f"must be TABLE.OPTION=VALUE, is {assignment!r}")
        try:
            value: object = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # no TOML, or a number of more digits than Python reads
            value = text
        tables.setdefault(table, {})[option] = value
    try:
        return json.dumps(tables, default=str)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("options", f"have a value that is no JSON: {error}") from error


def may_pass(error: CallFailed) -> bool:
    """Whether a later call may succeed: a leaving router may leave its last call without an answer."""
    return error.retryable or error.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def apply(connection: AsyncClient, order: Order, console: Console) -> None:
    """Raises `TandemError` if a service does not take the change in time, or if it fails and is undone.

    Ctrl-C ends only the display.
    """

    async with connection as client:
        begun_at = asyncio.get_running_loop().time()
        last = max((note.number for note in (await client.events(1)).events), default=0)
        answer = await client.apply(order.config, order.options, order.restart, order.stop, order.expected_revision)
        for line in answer.changes:
            print_line(console, line)
        async for note in _events_until_taken(client, answer, last):
            if answer.restarts:
                print_line(console, event_line(note))
    took_s = asyncio.get_running_loop().time() - begun_at
    is_new = answer.restarts or answer.changes
    told = f"every service has it after {took_s:.2f} s" if is_new else "it has these values already"
    print_line(console, f"config {answer.config_revision}: {told}")


async def _events_until_taken(
    client: AsyncClient, answer: cluster_pb2.ApplyResponse, last: int
) -> AsyncIterator[cluster_pb2.FleetNote]:
    """The events after number `last`, until every service has the config of the answer.

    A roll replaces the router that answers, too; its last call may stay without an answer. Then the connection is made
    again, to a router that serves. Raises `WorkerUnavailable` if the fleet ends meanwhile.
    """
    loop, revision = asyncio.get_running_loop(), answer.config_revision
    begun_at, heard_at, silent_s = loop.time(), loop.time(), GONE_S
    late, rolling = [""], True
    while late or rolling:
        await asyncio.sleep(ROLL_REFRESH_S if answer.restarts else REFRESH_S)  # the API has no stream of events
        try:
            fleet = await client.fleet()
            notes = await client.events(MAX_EVENTS, last)
        except CallFailed as error:
            if not may_pass(error):
                raise
            if loop.time() - heard_at > silent_s:
                raise WorkerUnavailable(
                    f"no router has answered for {silent_s:g} s: the fleet has ended, or serves at another address, "
                    f"before the change to config {revision} was complete ({error})"
                ) from error
            continue
        routers = {slot.state for slot in fleet.slots if slot.role == cluster_pb2.SERVICE_ROLE_ROUTER}
        if routers == {cluster_pb2.SLOT_STATE_DRAINING}:  # of a fleet that goes on, one more router is wanted
            raise WorkerUnavailable(f"the fleet stops before the change to config {revision} is complete")
        silent_s = GONE_S if routers <= _NOT_COMING else SILENT_S
        heard_at, rolling, late = loop.time(), fleet.rolling, services_without(revision, fleet)
        for note in notes.events:
            last = note.number
            yield note
        if not rolling and fleet.config_revision < revision:
            raise TandemError(f"the change has failed: every service has config {fleet.config_revision} again")
        if late and not answer.restarts and loop.time() > begun_at + PATIENCE_S:
            raise TandemError(f"not every service has config {revision} after {PATIENCE_S:g} s: {', '.join(late)}")
