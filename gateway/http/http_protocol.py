"""uvicorn's HTTP protocol with what it lacks: a bound and a deadline in every state, and a way past ASGI for streams.

    HEAD --head--> BODY --last byte--> ANSWER --last byte--> IDLE --first byte--> HEAD
      `--------------`-----------------`-- end of the answer, early or by `connection: close` --> closing --> lost

`check`, which the server calls once a second, ends a connection that has outlived its state. One request is open at a
time: bytes that come behind a request whose answer is open are dropped, and the connection closes after that answer.
So reading never pauses behind an open answer, and a client that leaves is noticed at once.

A request finds its connection in `scope["extensions"][CONNECTION]`. Once the head of a streamed answer is written,
`write_chunk` writes a part of the body to the transport at once.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import ApiError

CONNECTION = "tandem.connection"
MAX_CONNECTIONS = 8192  # HTTP connections of a process, at most half of its file descriptors; beyond: status 503
MAX_HEAD_BYTES = 64 * 1024  # head of a request; its trailers; bytes between two chunks; beyond: status 431
MAX_HEADERS = 256  # headers of a request; beyond: status 431
HEAD_TIMEOUT_S = 30.0  # from the first byte of a request to the end of its head; beyond: the connection closes
BODY_TIMEOUT_S = 60.0  # from the end of the head to the end of the body; beyond: status 408
BODY_GRACE_S = 5.0  # for the middleware, which answers status 408 first
KEEP_ALIVE_S = 75.0  # between two requests, longer than clients and proxies wait; beyond: the connection closes
# Limit: a client takes 64 KiB of its answer, or the rest, or its end; beyond: cut off, its request cancelled
WRITE_TIMEOUT_S = 60.0
LEAST_TAKEN_BYTES = 64 * 1024
READ_BY_THE_MIDDLEWARE = ("POST", "PUT", "PATCH")  # methods whose body is read before a route runs


class State(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()  # the request is complete; its own deadline ends it
    IDLE = auto()


class _AnyLength(int):
    """The length of an answer to HTTP/1.0, which knows no chunks: the connection ends it."""

    def __lt__(self, _: int) -> bool:
        return False

    def __sub__(self, _: int) -> _AnyLength:
        return self


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._state, self._since = State.HEAD, 0.0
        self._quiet_bytes = 0  # received since the last part of a request
        self._made_progress = False
        self._refusal: tuple[int, str, str] | None = None  # status, code and message
        self._drops = False  # all that comes
        self._has_chunks = True
        self._asks_for_upgrade = False  # the head that has arrived
        self._waiting: list[Callable[[], None]] = []
        self._unsent: int | None = None  # of a client that is behind
        self._stalled_since = 0.0
        self.tls: Any = None  # the `TlsProtocol` of a connection with TLS
        self._lower: asyncio.Transport  # of the socket, beneath TLS

    # ---- a stream writes

    def write_chunk(self, data: bytes) -> None:
        """Write `data`, which is not empty, as a part of the open answer."""
        if self.transport.is_closing():  # a TLS transport that is closed twice raises an error at a write
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunks else data)

    @property
    def is_full(self) -> bool:
        """The client is behind: the transport holds more than its limit."""
        return self.is_made and self.flow.write_paused

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the transport has room again or the connection is lost."""
        self._waiting.append(callback)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = None
        self._call_waiting()

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    # ---- a request arrives

    def accepted(self, transport: asyncio.Transport) -> None:
        """The socket is connected. `connection_made` follows, after the handshake of TLS if there is one."""
        self.transport = self._lower = transport
        self.connections.add(self)
        self._enter(State.HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.tls is None:
            self.accepted(transport)
        super().connection_made(transport)
        if self.are_too_many:
            self._refuse(503, "overloaded", "this process has too many connections")

    @property
    def is_made(self) -> bool:
        return self.flow is not None

    @property
    def are_too_many(self) -> bool:
        return len(self.connections) > min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        if self._state is State.IDLE:
            self._enter(State.HEAD)
        self._made_progress = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or (400, "invalid_http", f"not a request of HTTP/1.1: {error}")
        self._quiet_bytes = 0 if self._made_progress else self._quiet_bytes + len(data)
        if self._quiet_bytes > MAX_HEAD_BYTES:
            self._refusal = self._refusal or _HEADERS_TOO_LARGE
        if self._refusal is not None:
            self._refuse(*self._refusal)
        elif self._state is State.BODY and self.scope["method"] not in READ_BY_THE_MIDDLEWARE:
            self.cycle.keep_alive = False  # nobody reads the rest of the body

    def _feed(self, data: bytes) -> None:
        while data and not self._drops:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        """The head, for a new parser: after a head with an upgrade, httptools reads no body of HTTP/1.1. Java's client
        asks for HTTP/2 with its first request."""
        if not self._asks_for_upgrade:
            return b""
        self._asks_for_upgrade = False
        head = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        options = b",".join(value for name, value in self.headers if name == b"connection").lower().split(b",")
        kept = [(name, value) for name, value in self.headers if name not in (b"connection", b"upgrade")]
        if b"close" in map(bytes.strip, options):
            kept.append((b"connection", b"close"))
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([head, *(b"%b: %b" % entry for entry in kept), b"\r\n"])

    def on_message_begin(self) -> None:
        if self._is_answering:
            self._drop()
        else:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._drops:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._drops or self._state is State.BODY:  # trailers
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = _HEADERS_TOO_LARGE
        elif self._refusal is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._made_progress = True
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _HEADERS_TOO_LARGE
        if self._drops or self._refusal is not None:
            return
        self._asks_for_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_for_upgrade:
            return
        self._enter(State.BODY)
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        super().on_headers_complete()
        self._has_chunks = self.scope["http_version"] != "1.0"
        if not self._has_chunks:
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._made_progress = True
        if self._state is State.BODY and not self._drops:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._made_progress = True
        if self._state is State.BODY and not self._drops:
            super().on_message_complete()
            self._enter(State.ANSWER)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---- an answer ends

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._state is State.ANSWER:
            self._enter(State.IDLE)
        else:  # the rest of the body is still to come
            self._drop()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._call_waiting()

    def _drop(self) -> None:
        """Take no further byte, and close after the open answer."""
        self._drops = True
        if self._is_answering:
            self.cycle.keep_alive = False

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Close the connection: with this answer, or after the answer to a complete request."""
        self._drop()
        if self._is_answering:
            if self.cycle.response_started or self._state is State.ANSWER:
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = ApiError(status, message, kind, code=code).response().body
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # ---- time passes

    def _enter(self, state: State) -> None:
        self._state, self._since = state, self.loop.time()

    def check(self, now: float) -> None:
        """End the connection if it has outlived its state. `now` is the time of the loop."""
        is_closing = self.transport.is_closing()
        if is_closing:
            self._lower.close()  # else TLS waits for an answer to its end, which an idle client does not give
        if self.is_full or is_closing:  # it gets no more to write, so less in it means progress
            unsent = self._num_unsent()
            if self._unsent is None or self._unsent - unsent >= min(LEAST_TAKEN_BYTES, max(1, self._unsent)):
                self._unsent, self._stalled_since = unsent, now
            elif now - self._stalled_since > WRITE_TIMEOUT_S:
                self.abort()
        elif now - self._since > self._limit_s():
            self.transport.close()

    def _num_unsent(self) -> int:
        """Bytes. With TLS they are in two places, and most of them are beneath TLS."""
        above: int = 0 if self.tls is None else self.tls.num_unsent
        return above + self._lower.get_write_buffer_size()

    def abort(self) -> None:
        """The TLS transport cannot: it forgets its connection when it is closed a second time."""
        self._lower.abort()

    def _limit_s(self) -> float:
        match self._state:
            case State.HEAD:
                return HEAD_TIMEOUT_S
            case State.BODY:
                return BODY_TIMEOUT_S + BODY_GRACE_S
            case State.IDLE:
                return KEEP_ALIVE_S
            case State.ANSWER:
                return float("inf")


_HEADERS_TOO_LARGE = (
    431, "headers_too_large", f"headers: larger than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS}",
)  # fmt: skip
