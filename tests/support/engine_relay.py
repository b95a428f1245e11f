"""Drives an engine in another process over a Unix socket: pickled messages, each behind its length.

A caller's `Prompt` is submitted, a request id is aborted, a peer with its address is shaken hands with. The engine's
`EngineInfo` comes first, then its reports. One connection at a time has the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import AsyncIterator
from typing import Any

from core.config import TandemConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.service_host import Placement
from vllm_worker.engine import EngineInfo, EngineReport, Prompt

LENGTH_BYTES = 4


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    content = pickle.dumps(message)
    writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)


async def received(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """The messages until the connection ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
        while True:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            yield pickle.loads(await reader.readexactly(length))


class EngineServer:
    """The side of the engine: a service of its own, whose address is that of its socket."""

    def __init__(self, config: TandemConfig, placement: Placement) -> None:
        from cli import vllm  # of the environment of vLLM

        role = ServiceRole(placement.slot.partition("-")[0])
        build = {ServiceRole.PREFILL: vllm.build_prefill_worker, ServiceRole.DECODE: vllm.build_decode_worker}[role]
        self._engine = build(config, placement)._engine
        self._endpoint = Endpoint(placement.slot, f"\0{placement.slot} of {os.getpid()}", role)  # no file
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> Endpoint:
        self._info = await self._engine.start(self._on_report)
        self._server = await asyncio.start_unix_server(self._serve, self._endpoint.address)
        return self._endpoint

    async def failed(self) -> BaseException:
        return await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        self._server.close()
        await self._engine.close()

    def _on_report(self, report: EngineReport) -> None:
        if self._writer is not None:
            send(self._writer, report)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        send(writer, self._info)
        async for message in received(reader):
            if isinstance(message, Prompt):
                self._engine.submit(message)
            elif isinstance(message, tuple):
                self._engine.shake_hands(*message)
            else:
                self._engine.abort(message)
        writer.close()
        if self._writer is writer:
            self._writer = None


class RemoteEngine:
    """The side of the caller."""

    info: EngineInfo

    async def connect(self, path: str) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._messages = received(self._reader)
        self.info = await anext(self._messages)

    def submit(self, prompt: Prompt) -> None:
        send(self._writer, prompt)

    def abort(self, request_id: str) -> None:
        send(self._writer, request_id)

    def shake_hands(self, peer: str, address: bytes) -> None:
        send(self._writer, (peer, address))

    async def reports(self) -> AsyncIterator[EngineReport]:
        async for report in self._messages:
            yield report

    def close(self) -> None:
        self._writer.close()
