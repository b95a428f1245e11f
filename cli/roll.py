"""`tandem roll`: starts every service again, one at a time, and shows the progress until the roll has ended.

The router that answers is replaced, too. Then the connection is made again, to a router that serves.
"""

from __future__ import annotations

import asyncio

from rich.console import Console

from cli.events import event_line
from core.errors import TandemError
from tandem_client import AsyncClient, CallFailed

REFRESH_S = 1.0
MAX_EVENTS = 1000
SILENT_S = 60.0  # without an answer of any router


async def roll(connection: AsyncClient, config: str, stop: bool, console: Console) -> None:
    """Raises `TandemError` if the roll ends with another config than it should. Ctrl-C ends only the display."""
    async with connection as client:
        loop = asyncio.get_running_loop()
        last = max((note.number for note in (await client.events(1)).events), default=0)
        revision = (await client.roll(config, stop)).config_revision
        rolling, heard_at = True, loop.time()
        while rolling:
            await asyncio.sleep(REFRESH_S)  # the API has no stream of events
            try:
                fleet = await client.fleet()
                notes = await client.events(MAX_EVENTS, last)
            except CallFailed as error:
                if not error.retryable or loop.time() - heard_at > SILENT_S:
                    raise
                continue
            heard_at, rolling = loop.time(), fleet.rolling
            for note in notes.events:
                last = note.number
                console.print(event_line(note), highlight=False, markup=False, soft_wrap=True)
    if fleet.config_revision != revision:
        raise TandemError(f"the roll has failed: every service has config {fleet.config_revision} again")
