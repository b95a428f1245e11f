"""Digests travel from a producer's rank to a reader's rank over TCP.

    reader -> producer    the ticket's secret: 32 hexadecimal digits
    producer -> reader    the number of digests, 4 bytes, big-endian; then 16 bytes for each digest

A producer may be asked before it has digested: the connection waits. Digests that failed, or whose lease has ended, are
answered with the number 0. Everything is bounded, and each bound ends in the same way: the reader recomputes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verified_kv.digests import DIGEST_BYTES
from verified_kv.ticket import SECRET_CHARACTERS
from verified_kv.verifier import PendingDigests

MAX_CONNECTIONS = 128  # readers that ask a rank of vLLM for digests; beyond: the oldest of an unknown secret is closed
SECRET_TIMEOUT_S = 1.0  # from a connection to its secret
MAX_KEPT_BYTES = 64 << 20  # digests whose lease has not ended; beyond: the oldest are dropped
MAX_RETIRED = 4096  # secrets whose digests are gone, answered with none at once; beyond: the oldest is forgotten
MAX_FETCHES = 1024  # requests for whose digests a rank of vLLM waits; beyond: the next one is recomputed
MAX_TIMEOUTS = 3  # timeouts in a row of an address that is asked for digests; beyond: nobody asks it for `PAUSE_S`
PAUSE_S = 60.0
MAX_SLOW_ADDRESSES = 1024  # addresses whose last answer timed out; beyond: the oldest is forgotten
STOP_TIMEOUT_S = 5.0
LENGTH_BYTES = 4
NOTHING = bytes(LENGTH_BYTES)

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers


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
        """Not when the interpreter ends: it has stopped the thread then, and nothing would answer."""
        if sys.is_finalizing():
            return
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self.submit(self._cancel_all()).result(STOP_TIMEOUT_S)
            self.post(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False, slots=True)
class _Connection:
    writer: asyncio.StreamWriter
    answer: asyncio.Future[bytes]  # empty: the client has gone
    secret: str = ""  # until it is shown
    is_known: bool = False


class DigestServer:
    """Of one rank of a producer. All methods run in its loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # for a connection, and for a reader that is late
        # Half of the process's files at most: vLLM opens files too.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = MAX_CONNECTIONS if files < 0 else max(1, min(MAX_CONNECTIONS, files // 2))
        self._kept: dict[str, bytes] = {}  # answers by secret, oldest first
        self._num_kept_bytes = 0
        self._retired: dict[str, None] = {}  # secrets whose answers are gone, oldest first
        self._open: dict[_Connection, None] = {}  # oldest first
        self._serving: asyncio.Task[None] | None = None  # to its cancellation

    async def start(self, host: str, port: int) -> int:
        """The port. Raises `OSError`."""
        server = await asyncio.start_server(self._serve, host, port, limit=2 * SECRET_CHARACTERS)
        self._serving = asyncio.create_task(server.serve_forever())
        return int(server.sockets[0].getsockname()[1])

    async def publish(self, secret: str, pending: PendingDigests) -> None:
        """Keeps the answer until `retire`, for each reader of a request that was divided, or tried again."""
        try:
            digests = pending.poll()
            if digests is None:
                digests = await asyncio.to_thread(pending.wait)
        except Exception:  # of the device
            logger.exception("The digests of a request failed. Its reader recomputes.")
            digests = []
        if secret in self._retired:
            return
        answer = len(digests).to_bytes(LENGTH_BYTES, "big") + b"".join(digests)
        for connection in self._open:
            if connection.secret == secret and not connection.answer.done():
                connection.answer.set_result(answer)
        self._kept[secret] = answer
        self._num_kept_bytes += len(answer)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def retire(self, secret: str) -> None:
        """The lease of the blocks has ended. A reader may have read them just now, and ask late."""
        asyncio.get_running_loop().call_later(self._timeout_s, self._drop, secret)

    def _drop(self, secret: str) -> None:
        self._num_kept_bytes -= len(self._kept.pop(secret, b""))
        self._retired[secret] = None
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, asyncio.get_running_loop().create_future())
        try:
            if not self._make_room():
                return
            self._open[connection] = None
            async with asyncio.timeout(self._timeout_s):
                async with asyncio.timeout(SECRET_TIMEOUT_S):
                    connection.secret = (await reader.readexactly(SECRET_CHARACTERS)).decode("ascii", "replace")
                writer.write(await self._answer(connection, reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the reader counts what it did not get
        finally:
            self._open.pop(connection, None)
            writer.transport.abort()

    def _make_room(self) -> bool:
        """Strangers, who know no secret, have at most half of the places, and lose them to whoever comes."""
        unknown = [connection for connection in self._open if not connection.is_known]
        if len(self._open) < self._max_connections and len(unknown) < max(1, self._max_connections // 2):
            return True
        if not unknown:
            return False
        del self._open[unknown[0]]
        unknown[0].writer.transport.abort()
        return True

    async def _answer(self, connection: _Connection, reader: asyncio.StreamReader) -> bytes:
        """Waits until the digests are there, or the client goes."""
        connection.is_known = connection.secret in self._kept
        if connection.is_known:
            return self._kept[connection.secret]
        if connection.secret in self._retired:
            return NOTHING
        watch = asyncio.create_task(self._watch(connection, reader))
        try:
            return await connection.answer
        finally:
            watch.cancel()

    async def _watch(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)  # the end; more than a secret is no reader
        if not connection.answer.done():
            connection.answer.set_result(b"")


class DigestFetcher:
    """Of one rank of a reader. Runs in its loop."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._num_fetches = 0
        self._slow: dict[tuple[str, int], tuple[int, float]] = {}  # timeouts in a row and time of the last, by address

    async def fetch(
        self, address: tuple[str, int], secret: str, num_digests: int, num_needed: int
    ) -> list[bytes] | None:
        """The first `num_needed`; None unless the producer has exactly `num_digests`, or without an answer in time."""
        if self._num_fetches >= MAX_FETCHES or self._is_paused(address):
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
        except TimeoutError:
            self._note_timeout(address)
            return None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            return None
        finally:
            self._num_fetches -= 1
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.transport.abort()
        self._slow.pop(address, None)
        return [content[place : place + DIGEST_BYTES] for place in range(0, len(content), DIGEST_BYTES)]

    def _is_paused(self, address: tuple[str, int]) -> bool:
        num_timeouts, last = self._slow.get(address, (0, 0.0))
        return num_timeouts >= MAX_TIMEOUTS and self._clock() < last + PAUSE_S

    def _note_timeout(self, address: tuple[str, int]) -> None:
        num_timeouts, _ = self._slow.pop(address, (0, 0.0))
        self._slow[address] = (num_timeouts + 1, self._clock())
        if len(self._slow) > MAX_SLOW_ADDRESSES:
            del self._slow[next(iter(self._slow))]
