"""A TCP connection between two services. A test can make it a black hole: no byte passes, and no side gets an error.

async with TcpLink.to(worker_address) as link:
    ...  # the router dials link.address
    link.vanish()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

CHUNK_BYTES = 1 << 16


class TcpLink:
    def __init__(self, target: str) -> None:
        self._target_host, _, port = target.rpartition(":")
        self._target_port = int(port)
        self.address = ""
        self.num_bytes_held = 0  # arrived while the link was a black hole
        self._passing = asyncio.Event()
        self._passing.set()
        self._pumps: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, target: str) -> AsyncIterator[TcpLink]:
        link = cls(target)
        server = await asyncio.start_server(link._accept, "127.0.0.1", 0)
        link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield link
        finally:
            server.close()
            for pump in link._pumps:
                pump.cancel()
            await asyncio.gather(*link._pumps, return_exceptions=True)

    def vanish(self) -> None:
        """Stop all bytes in both directions, and also the end of a connection."""
        self._passing.clear()

    def mend(self) -> None:
        self._passing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(self._target_host, self._target_port)
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(CHUNK_BYTES):
                    if not self._passing.is_set():
                        self.num_bytes_held += len(data)
                        await self._passing.wait()
                    sink.write(data)
                    await sink.drain()
            await self._passing.wait()
        finally:
            sink.close()
