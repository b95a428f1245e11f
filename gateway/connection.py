"""Answers that end with their connection: a client that goes away cancels its work, and with it every gRPC call.

`while_connected` runs work beside a watch of the connection. `EventStream` writes server-sent events as they come, one
message to the server for each message of the router, without a framework between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientGone, server_stops

T = TypeVar("T")
E = TypeVar("E", contravariant=True)

LAST_EVENT_TIMEOUT_S = 0.5  # of a server that stops
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx would hold events back
)


class EventFormat(Protocol[E]):
    """Turns the events of a generation into server-sent events. It never waits."""

    def push(self, event: E) -> bytes:
        """The text for `event`; may be empty."""

    def end(self) -> bytes:
        """The text after the last event."""

    def fail(self, error: Exception) -> bytes:
        """The text if `error` ends the stream early; nothing follows."""


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


async def first_of(receive: Receive, events: AsyncGenerator[T, None]) -> T:
    """The first event. An error before it can still become the status of the answer."""
    return await while_connected(receive, anext(events))


class EventStream(Response, Generic[T]):
    """`first` and then `events`, as `form` writes them. Closes `events` in every case.

    `count` takes the mean seconds that an event after the first took here.
    """

    def __init__(
        self,
        first: T,
        events: AsyncGenerator[T, None],
        form: EventFormat[T],
        headers: dict[str, str],
        count: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._first, self._events, self._form, self._count = first, events, form, count
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((key.encode(), value.encode()) for key, value in headers.items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            await while_connected(receive, self._write(send))
        except (ClientGone, OSError):  # servers raise OSError where the connection is gone
            return
        except asyncio.CancelledError:  # by the server, after its drain
            await self._cut_off(send)
        finally:
            await self._events.aclose()

    async def _cut_off(self, send: Send) -> None:
        text = self._form.fail(server_stops())
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
                await send({"type": "http.response.body", "body": text, "more_body": False})

    async def _write(self, send: Send) -> None:
        form = self._form
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        text = form.push(self._first)
        del self._first
        if text:
            await send({"type": "http.response.body", "body": text, "more_body": True})
        seconds, num_events = 0.0, 0
        try:
            async for event in self._events:
                start = time.perf_counter()
                text = form.push(event)
                if text:
                    await send({"type": "http.response.body", "body": text, "more_body": True})
                seconds += time.perf_counter() - start
                num_events += 1
            text = form.end()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  the status is sent; the error is an event
            text = form.fail(error)
        finally:
            if num_events:
                self._count(seconds / num_events)
        await send({"type": "http.response.body", "body": text, "more_body": False})
