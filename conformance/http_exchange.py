"""One HTTP exchange with a stack that may be hostile: every read is bounded, in bytes and in time.

    connect -> send -> read until the message is complete, `observe` says enough, a bound is met, or the stack closes

Each exchange has a connection of its own, follows no redirect, and ignores proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

import httptools

MAX_REPLY_BYTES = 4 << 20  # of a page or a list of models of a checked stack; beyond: the check closes the connection
MAX_HEAD_BYTES = 64 << 10  # of the head of a reply, and of those before it; beyond: as above
_PIECE_BYTES = 1 << 16
_EVENT = b"data:"


class End(Enum):
    """How an exchange ended."""

    COMPLETE = "complete"
    CUT = "cut off before its end"
    LATE = "not complete in time"
    TOO_LARGE = "too large"
    MALFORMED = "not one answer of HTTP/1.1"
    UNREACHABLE = "no connection"
    UNTRUSTED = "no TLS with a valid certificate"
    LEFT = "left by this check"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a stack serves. `path` stands before `/v1`; `key` is an API key, or empty."""

    host: str
    port: int
    tls: bool
    path: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Endpoint:
        """Raises `ValueError` with the reason."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must be host:port or a URL of HTTP, is {url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("a URL must have no user, query or fragment: they would not be sent")
        if any(ord(character) < 33 or ord(character) > 126 for character in url + key):
            raise ValueError("a URL and a key have printable ASCII characters only")
        parts.hostname.encode("idna")  # what a resolver would do; an empty label is a `ValueError`
        tls = parts.scheme == "https"
        return cls(
            parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"), key
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.path}"


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `path` is that of the route, such as `/v1/completions`; no body: GET."""

    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    max_reply_bytes: int = MAX_REPLY_BYTES

    def encode(self, endpoint: Endpoint) -> bytes:
        lines = [
            f"{'POST' if self.body else 'GET'} {endpoint.path}{self.path} HTTP/1.1",
            f"host: {endpoint.authority}",
            "connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if endpoint.key:
            lines.append(f"authorization: Bearer {endpoint.key}")
        if self.body:
            lines += ["content-type: application/json", f"content-length: {len(self.body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@dataclass(slots=True)
class Reply:
    """What came so far. Times are seconds after the request was sent."""

    status: int = 0
    is_delimited: bool = False  # by its head; else the end of the connection is that of the body
    body: bytearray = field(default_factory=bytearray)
    end: End = End.LATE
    seconds: float = 0.0  # until the last byte, or until the check gave up
    longest_gap_s: float = 0.0  # between two arrivals of the body
    num_events: int = 0  # server-sent ones that have begun


Observe = Callable[[Reply], bool]  # True: enough, leave


class _Parser:
    """Fills a `Reply` from the bytes of a connection, through the callbacks of httptools.

    `complete`: one answer has come. Bytes of a second one are malformed: which of the two a client takes is chance.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self.complete = self.has_head = False

    def feed(self, data: bytes) -> None:
        """Raises `HttpParserError`."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        if self.complete:
            raise httptools.HttpParserError("a second answer")

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._reply.is_delimited |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self.has_head = self._reply.status >= 200

    def on_body(self, body: bytes) -> None:
        seen = len(self._reply.body)
        self._reply.body += body
        # What ends in these bytes: the start of a mark may have come before.
        self._reply.num_events += self._reply.body.count(_EVENT, max(0, seen - len(_EVENT) + 1))

    def on_message_complete(self) -> None:
        self.complete = self.has_head


@contextlib.asynccontextmanager
async def connected(endpoint: Endpoint, call: Call) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which `call` was sent. At its end it is aborted. Raises `OSError`."""
    context = ssl.create_default_context() if endpoint.tls else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        writer.write(call.encode(endpoint))
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def exchange(endpoint: Endpoint, call: Call, limit_s: float, observe: Observe | None = None) -> Reply:
    """The reply, whatever became of it. `observe` sees it after each arrival."""
    reply, clock = Reply(), asyncio.get_running_loop()
    start, parser = clock.time(), _Parser(reply)
    try:
        async with asyncio.timeout(limit_s), connected(endpoint, call) as reader:
            await _read(reader, parser, reply, call.max_reply_bytes, lambda: clock.time() - start, observe)
    except TimeoutError:
        reply.end, reply.seconds = End.LATE, clock.time() - start
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        reply.end = End.MALFORMED
    except ssl.SSLError:
        reply.end = End.CUT if reply.status else End.UNTRUSTED
    except OSError:
        reply.end = End.CUT if reply.status else End.UNREACHABLE
    return reply


async def _read(
    reader: asyncio.StreamReader,
    parser: _Parser,
    reply: Reply,
    max_bytes: int,
    elapsed_s: Callable[[], float],
    observe: Observe | None,
) -> None:
    num_bytes = 0
    while not parser.complete:
        data = await reader.read(_PIECE_BYTES)
        if not data:
            reply.end = End.COMPLETE if parser.has_head and not reply.is_delimited else End.CUT
            return
        before, now = len(reply.body), elapsed_s()
        parser.feed(data)
        if len(reply.body) > before:
            if before:
                reply.longest_gap_s = max(reply.longest_gap_s, now - reply.seconds)
            reply.seconds = now
        num_bytes += len(data)
        if num_bytes > (max_bytes if parser.has_head else MAX_HEAD_BYTES):
            reply.end = End.TOO_LARGE
            return
        if observe is not None and observe(reply):
            reply.end = End.LEFT
            return
    reply.end, reply.seconds = End.COMPLETE, elapsed_s()
