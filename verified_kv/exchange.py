"""Digests travel from a producer's rank to a reader's rank over TCP, once for each ticket.

    reader -> producer    the ticket's secret: 32 hexadecimal digits
    producer -> reader    the number of digests, 4 bytes, big-endian; then 16 bytes for each digest

A producer may be asked before it has digested: the connection waits. Everything is bounded, and each bound ends in the
same way: the reader gets no digests, and recomputes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from verified_kv.digests import DIGEST_BYTES
from verified_kv.ticket import SECRET_CHARACTERS
from verified_kv.verifier import PendingDigests

MAX_CONNECTIONS = 1024  # readers that ask a rank of vLLM for digests; beyond: the connection is closed
MAX_KEPT_BYTES = 64 << 20  # digests that no reader has asked for; beyond: the oldest are dropped
MAX_FETCHES = 1024  # requests for whose digests a rank of vLLM waits; beyond: the next one is recomputed
LENGTH_BYTES = 4


class LoopThread:
    """An event loop in a thread of its own, because vLLM's steps run in no loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verified-kv", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, call: Any, *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self.submit(self._cancel_all()).result()
            self.post(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DigestServer:
    """Of one rank of a producer. All methods run in its loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # for a connection, and for an answer that is late
        self._kept: dict[str, bytes] = {}  # answers by secret, oldest first
        self._num_kept_bytes = 0
        self._waiting: dict[str, asyncio.Future[bytes]] = {}  # connections by secret
        self._num_connections = 0
        self._serving: asyncio.Task[None] | None = None  # to its cancellation

    async def start(self, host: str, port: int) -> int:
        """The port. Raises `OSError`."""
        server = await asyncio.start_server(self._serve, host, port, limit=2 * SECRET_CHARACTERS)
        self._serving = asyncio.create_task(server.serve_forever())
        return int(server.sockets[0].getsockname()[1])

    async def publish(self, secret: str, pending: PendingDigests) -> None:
        digests = pending.poll()
        if digests is None:
            digests = await asyncio.to_thread(pending.wait)
        answer = len(digests).to_bytes(LENGTH_BYTES, "big") + b"".join(digests)
        if (waiting := self._waiting.get(secret)) is not None and not waiting.done():
            waiting.set_result(answer)
            return
        self._kept[secret] = answer
        self._num_kept_bytes += len(answer)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._take(next(iter(self._kept)))

    def retire(self, secret: str) -> None:
        """The lease of the blocks has ended. A reader may have read them just now, and ask late."""
        asyncio.get_running_loop().call_later(self._timeout_s, self._take, secret)

    def _take(self, secret: str) -> bytes | None:
        answer = self._kept.pop(secret, None)
        self._num_kept_bytes -= len(answer or b"")
        return answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_connections += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                secret = (await reader.readexactly(SECRET_CHARACTERS)).decode("ascii", "replace")
                writer.write(await self._answer(secret))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the reader counts what it did not get
        finally:
            self._num_connections -= 1
            writer.transport.abort()

    async def _answer(self, secret: str) -> bytes:
        """Waits until the digests are there. Empty for a secret that another connection shows."""
        if (answer := self._take(secret)) is not None:
            return answer
        if secret in self._waiting:
            return b""
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[secret] = waiting
        try:
            return await waiting
        finally:
            del self._waiting[secret]


class DigestFetcher:
    """Of one rank of a reader. Runs in its loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_fetches = 0

    async def fetch(
        self, address: tuple[str, int], secret: str, num_digests: int, num_needed: int
    ) -> list[bytes] | None:
        """The first `num_needed`; None unless the producer has exactly `num_digests`, or without an answer in time."""
        if self._num_fetches >= MAX_FETCHES:
            return None
        self._num_fetches += 1
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(secret.encode())
                if int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big") != num_digests:
                    return None
                content = await reader.readexactly(num_needed * DIGEST_BYTES)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            return None
        finally:
            self._num_fetches -= 1
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.transport.abort()
        return [content[place : place + DIGEST_BYTES] for place in range(0, len(content), DIGEST_BYTES)]
