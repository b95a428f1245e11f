"""Answers that end with their connection: a client that goes away cancels its work, and with it every call.

`while_connected` runs work beside a watch of the connection. `EventWriter` is the sink of a streamed answer: it makes
the bytes of an event, and writes them to the transport of the connection in the same call. Only the head and the end of
the answer pass through the ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientGone, server_stops
from gateway.formats.form import AnswerForm
from gateway.http.http_protocol import CONNECTION, BoundedHttpProtocol
from gateway.router_calls import Chunk
from tandem_client.stubs.inference_pb2 import Finished

T = TypeVar("T")

LAST_EVENT_TIMEOUT_S = 0.5  # of a server that stops
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx would hold events back
)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. Raises `ClientGone`, and cancels `work`, once the client has closed the connection.

    `work` runs in this task. So its result goes on at once, before other streams of the event loop write.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone, num_cancelling = False, task.cancelling()

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == num_cancelling + 1:
            raise ClientGone("the client closed the connection") from None
        raise
    finally:
        watching.cancel()
        if is_gone:
            task.uncancel()


class EventWriter:
    """The sink of a streamed answer. Events are held until `attach` gives the connection: those of one part, because
    the head and these events wait for a client that does not read."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._connection: BoundedHttpProtocol | None = None
        self._held: list[bytes] = []
        self._waiting: list[Callable[[], None]] = []  # for the connection
        self._seconds, self._num_parts = 0.0, 0
        self.has_begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def chunk(self, chunk: Chunk) -> None:
        self._write(time.perf_counter(), self._form.chunk(chunk))

    def finished(self, finished: Finished) -> None:
        self._write(time.perf_counter(), self._form.finished(finished))

    def filtered(self, choice: int) -> None:
        self._write(time.perf_counter(), self._form.filtered(choice))

    def _write(self, start: float, text: bytes) -> None:
        if self._connection is not None:
            if text:
                self._connection.write_chunk(text)
        else:
            self._held.append(text)
            if not self.has_begun.done():
                self.has_begun.set_result(None)
        self._seconds += time.perf_counter() - start
        self._num_parts += 1

    @property
    def is_full(self) -> bool:
        return bool(self._held) if self._connection is None else self._connection.is_full

    def when_room(self, callback: Callable[[], None]) -> None:
        if self._connection is None:
            self._waiting.append(callback)
        else:
            self._connection.when_room(callback)

    def attach(self, connection: BoundedHttpProtocol) -> None:
        """Write to `connection` from now on. The head of the answer must be written."""
        self._connection = connection
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def take_held(self) -> bytes:
        held, self._held = b"".join(self._held), []
        return held

    def end(self) -> bytes:
        return self._form.end()

    def fail(self, error: Exception) -> bytes:
        return self._form.fail(error)

    @property
    def seconds_per_part(self) -> float:
        """Mean time to make and to write the events of one part."""
        return self._seconds / max(1, self._num_parts)


class EventStream(Response):
    """The answer of `writer`, which `generating` fills. Cancels `generating` if the client goes away.

    `count` takes the mean seconds that a part took in the writer.
    """

    def __init__(
        self,
        writer: EventWriter,
        generating: asyncio.Task[None],
        headers: dict[str, str],
        count: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._writer, self._generating, self._count = writer, generating, count
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((key.encode(), value.encode()) for key, value in headers.items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(scope, send))
        except (ClientGone, OSError):  # servers raise OSError where the connection is gone
            return
        except asyncio.CancelledError:  # by the server, after its drain
            await self._cut_off(send)
        finally:
            self._generating.cancel()
            self._count(self._writer.seconds_per_part)

    async def _cut_off(self, send: Send) -> None:
        text = self._writer.fail(server_stops())
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
                await send({"type": "http.response.body", "body": text, "more_body": False})

    async def _stream(self, scope: Scope, send: Send) -> None:
        writer = self._writer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while text := writer.take_held():
            await send({"type": "http.response.body", "body": text, "more_body": True})
        writer.attach(scope["extensions"][CONNECTION])
        try:
            await self._generating
            text = writer.end()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  the status is sent; the error is an event
            text = writer.fail(error)
        await send({"type": "http.response.body", "body": text, "more_body": False})
