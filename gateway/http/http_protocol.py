"""uvicorn's HTTP protocol with what it lacks: bounds for the head of a request, and a way past ASGI for streams.

A request finds its connection in `scope["extensions"][CONNECTION]`. Once the head of a chunked answer is written,
`write_chunk` writes a chunk of the body to the transport at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
CONNECTION = "tandem.connection"
HEAD_TIMEOUT_S = 30.0  # from the first byte of a connection or request to the end of its head


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a larger head, and closes a connection that sends no head in time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._num_heads = 0  # that are complete
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._when_room: Callable[[], None] | None = None

    # ---- a stream writes

    def write_chunk(self, data: bytes) -> None:
        """Write `data`, which is not empty, as one chunk of the open answer."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def is_full(self) -> bool:
        """The client is behind: the transport holds more than its limit."""
        return self.flow.write_paused

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the transport has room again or the connection is lost."""
        self._when_room = callback

    def resume_writing(self) -> None:
        super().resume_writing()
        self._call_when_room()

    def _call_when_room(self) -> None:
        callback, self._when_room = self._when_room, None
        if callback is not None:
            callback()

    # ---- a request arrives

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_timer is None:
            self._start_timer()
        was_in_head, num_heads = self._in_head, self._num_heads
        super().data_received(data)
        if was_in_head and self._num_heads == num_heads:  # else the end of a head or of a body is in `data`
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._num_heads += 1
        self._stop_timer()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._call_when_room()

    def _refuse_head(self) -> None:
        body = (
            b'{"error": {"message": "headers: larger than %d bytes", "type": "invalid_request_error", '
            b'"param": null, "code": "headers_too_large"}}' % MAX_HEAD_BYTES
        )
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
