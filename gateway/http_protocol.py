"""uvicorn's HTTP protocol with bounds that it lacks: the size of the head of a request, and the time for it."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_TIMEOUT_S = 30.0  # from the first byte of a connection or request to the end of its head


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a larger head, and closes a connection that sends no head in time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._num_heads = 0  # that are complete
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

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
