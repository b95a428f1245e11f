"""What `tandem config` does: print the config of a fleet, ask for a change, and wait until every service has it."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console

from cli.health import services_without
from core.config import from_mapping, is_live
from core.errors import InvalidRequest, TandemError
from tandem_client import AsyncClient

REFRESH_S = 0.02
PATIENCE_S = 10.0  # for a service that does not take the change


async def show(connection: AsyncClient) -> None:
    async with connection as client:
        found = await client.config()
    print(
        f"# Config {found.config_revision} of the fleet at {client.address}; `tandem config set` changes live options."
    )
    print("\n".join(toml_lines(json.loads(found.config))))


def toml_lines(tables: dict[str, Any]) -> Iterator[str]:
    config = from_mapping(tables)
    for table, content in tables.items():
        entries = content if isinstance(content, list) else [content]
        for entry in entries:
            yield f"\n[[{table}]]" if isinstance(content, list) else f"\n[{table}]"
            for option, value in entry.items():
                # The strings, numbers and arrays of the config look the same in JSON and TOML.
                line = f"{option} = {json.dumps(value, ensure_ascii=False)}"
                marked = isinstance(content, dict) and is_live(config, table, option)
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
        except tomllib.TOMLDecodeError:
            value = text
        tables.setdefault(table, {})[option] = value
    return json.dumps(tables, default=str)


async def change(connection: AsyncClient, console: Console, config: str = "", options: str = "") -> None:
    """Raises `TandemError` if a service does not take the change in time."""
    async with connection as client:
        begun_at = asyncio.get_running_loop().time()
        changed = await client.change_config(config, options)
        revision = changed.config_revision
        for line in changed.changes:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        while late := services_without(revision, await client.fleet()):
            if asyncio.get_running_loop().time() > begun_at + PATIENCE_S:
                raise TandemError(f"not every service has config {revision} after {PATIENCE_S:g} s: {', '.join(late)}")
            await asyncio.sleep(REFRESH_S)
    took_s = asyncio.get_running_loop().time() - begun_at
    told = f"every service has it after {took_s:.2f} s" if changed.changes else "it has these values already"
    console.print(f"config {revision}: {told}", highlight=False, markup=False, soft_wrap=True)
