"""Answers that end with their connection: a client that goes away cancels its work, and with it every call.

`while_connected` runs work beside a watch of the connection. `EventStream` is a streamed answer: it makes the bytes of
an event, and writes them to the transport of the connection in the same call. Only the head and the end of the answer
pass through the ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

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


class EventStream(Response):
    """A streamed answer, and the sink of its parts. Events are held until the head is written: those of one part,
    because the head and these events wait for a client that does not read.

    `count` takes the mean seconds that a part took here.
    """

    def __init__(
        self, form: AnswerForm, headers: dict[str, str], count: Callable[[float], None] = lambda _: None
    ) -> None:
        self._form, self._count = form, count
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((key.encode(), value.encode()) for key, value in headers.items())]
        self._connection: BoundedHttpProtocol | None = None  # None: the head is not written
        self._held: list[bytes] = []
        self._waiting: list[Callable[[], None]] = []  # for the connection
        self._seconds, self._num_parts = 0.0, 0
        self._has_begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generating: asyncio.Task[None]  # from `begin` on

    async def begin(self, generating: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run `generating`, which fills this sink, and return with its first part: a refusal before it has its own
        status. Raises the error of `generating`, and `ClientGone`."""
        self._generating = asyncio.create_task(generating)
        self._generating.add_done_callback(_note_end)
        try:
            begun = asyncio.wait((self._generating, self._has_begun), return_when=asyncio.FIRST_COMPLETED)
            await while_connected(receive, begun)
            if not self._has_begun.done():
                await self._generating  # raises its error
        except BaseException:
            self._generating.cancel()
            raise

    # ---- the sink

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
            if not self._has_begun.done():
                self._has_begun.set_result(None)
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

    # ---- the response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancels the call if the client goes away."""
        try:
            await while_connected(receive, self._stream(scope, send))
        except (ClientGone, OSError):  # servers raise OSError where the connection is gone
            return
        except asyncio.CancelledError:  # by the server, after its drain
            await self._cut_off(send)
        finally:
            self._generating.cancel()
            self._count(self._seconds / max(1, self._num_parts))

    async def _cut_off(self, send: Send) -> None:
        text = self._form.fail(server_stops())
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
                await send({"type": "http.response.body", "body": text, "more_body": False})

    async def _stream(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while text := b"".join(self._held):
            self._held.clear()
            await send({"type": "http.response.body", "body": text, "more_body": True})
        self._connection = scope["extensions"][CONNECTION]
        for callback in self._waiting:
            callback()
        try:
            await self._generating
            text = self._form.end()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  the status is sent; the error is an event
            text = self._form.fail(error)
        await send({"type": "http.response.body", "body": text, "more_body": False})


def _note_end(generating: asyncio.Task[None]) -> None:
    """Without a look at its error, asyncio logs a call that failed after its client had gone."""
    if not generating.cancelled():
        generating.exception()
