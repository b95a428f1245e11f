"""One connection: each state has a bound of bytes and a deadline, whatever a client sends and however slowly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.http import http_protocol
from gateway.http.http_protocol import (
    BODY_GRACE_S,
    BODY_TIMEOUT_S,
    CONNECTION,
    HEAD_TIMEOUT_S,
    KEEP_ALIVE_S,
    LEAST_TAKEN_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    WRITE_TIMEOUT_S,
    BoundedHttpProtocol,
)
from gateway.http.tls import TlsProtocol
from tests.support.certificates import Authority

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
BODY_LIMIT_S = BODY_TIMEOUT_S + BODY_GRACE_S
HIGH_WATER = 64 * 1024


class Transport(asyncio.Transport):
    """Keeps all that is written until the client reads it."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__()
        self.protocol: Any = protocol
        self.written, self.unread = b"", 0
        self.is_closed = self.is_lost = self.is_reading_paused = False
        self.is_full = self.has_late_write = False

    def write(self, data: Any) -> None:
        if self.is_closed:
            self.has_late_write = True
            return
        self.written += bytes(data)
        self.unread += len(data)
        if self.unread > HIGH_WATER and not self.is_full:
            self.is_full = True
            self.protocol.pause_writing()

    def read(self, size: int) -> None:
        """The client reads."""
        self.unread = max(0, self.unread - size)
        if self.is_full and not self.unread:
            self.is_full = False
            self.protocol.resume_writing()
        if self.is_closed and not self.unread:
            self.abort()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True
        if not self.unread:
            self.abort()

    def abort(self) -> None:
        if not self.is_lost:
            self.is_closed = self.is_lost = True
            self.protocol.connection_lost(None)

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default


class Client:
    """A client, and the application that answers it: `answers` bytes, or nothing before `release` is set."""

    def __init__(self, answer: bytes = b"", waits: bool = False, begins_late: bool = False) -> None:
        self.answer, self.release, self.begins_late = answer, asyncio.Event(), begins_late
        self.num_calls, self.has_left, self.connection = 0, False, None
        self.body = b""
        if not waits:
            self.release.set()
        self.start = asyncio.get_running_loop().time()
        config = uvicorn.Config(self._app, interface="asgi3", log_config=None, access_log=False, proxy_headers=False)
        self.state = ServerState()
        self.protocol = BoundedHttpProtocol(config=config, server_state=self.state, app_state={})
        self.transport = Transport(self.protocol)
        self._connect()

    def _connect(self) -> None:
        self.protocol.connection_made(self.transport)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        self.connection = scope["extensions"][CONNECTION]
        if self.begins_late:
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        releasing = asyncio.create_task(self.release.wait())
        while not self.release.is_set():
            receiving = asyncio.create_task(receive())
            await asyncio.wait((receiving, releasing), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
            elif receiving.result()["type"] == "http.request":
                self.body += receiving.result()["body"]
            else:
                self.has_left = True
                releasing.cancel()
                return
        await send({"type": "http.response.body", "body": self.answer, "more_body": False})

    async def sends(self, *parts: bytes) -> None:
        for part in parts:
            if not self.transport.is_closed:
                self._deliver(part)
            await self.settles()

    def _deliver(self, data: bytes) -> None:
        self.protocol.data_received(data)

    async def settles(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def after(self, seconds: float) -> None:
        """A second at a time, as the server does."""
        for second in range(int(seconds) + 1):
            if not self.transport.is_lost:
                self.protocol.check(self.start + second)

    def has_answer(self, status: int) -> bool:
        return f"HTTP/1.1 {status} ".encode() in self.transport.written


@functools.cache
def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as directory:
        context.load_cert_chain(*Authority(Path(directory) / "authority").sign("here"))
    return context


class TlsClient(Client):
    """The same over TLS: `transport` is the one of the socket."""

    def _connect(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)
        self._layer: Any = TlsProtocol(server_context(), self.protocol)
        self.transport.protocol = self._layer
        self._layer.connection_made(self.transport)
        self.shakes_hands()

    def shakes_hands(self) -> None:
        for _ in range(3):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
            self._pass()
            self._incoming.write(self.transport.written)
            self.transport.written, self.transport.unread = b"", 0

    def _deliver(self, data: bytes) -> None:
        self.tls.write(data)
        self._pass()

    def says_goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._pass()

    def _pass(self) -> None:
        data = self._outgoing.read()
        if data:
            self._layer.get_buffer(len(data))[: len(data)] = data
            self._layer.buffer_updated(len(data))


DRIPPED_HEAD = [bytes([byte]) for byte in GET[:-1]]


@pytest.mark.parametrize(
    ("parts", "limit_s"),
    [
        ([], HEAD_TIMEOUT_S),
        (DRIPPED_HEAD, HEAD_TIMEOUT_S),
        ([GET], KEEP_ALIVE_S),
        ([GET, b"\r\n"], HEAD_TIMEOUT_S),
        ([GET, b"G"], HEAD_TIMEOUT_S),
        ([CHUNKED, b"5\r\nhe"], BODY_LIMIT_S),
        ([CHUNKED, b"0\r\n", b"x: y\r\n"], BODY_LIMIT_S),
        ([b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nhell"], BODY_LIMIT_S),
    ],
)
async def test_a_state_ends_at_its_deadline_and_not_before(parts: list[bytes], limit_s: float) -> None:
    client = Client(waits=any(part.startswith(b"POST") for part in parts))
    await client.sends(*parts)
    client.transport.read(HIGH_WATER)
    client.after(limit_s - 1)
    assert not client.transport.is_closed
    client.after(limit_s + 2)
    assert client.transport.is_lost


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n", CHUNKED])
async def test_a_request_whose_body_nobody_reads_ends_its_connection_with_the_answer(head: bytes) -> None:
    client = Client()
    await client.sends(head, b"x")
    client.transport.read(HIGH_WATER)
    assert client.transport.is_lost
    assert (b"connection: close" in client.transport.written) == head.startswith(b"GET")


async def test_trailers_are_no_headers() -> None:
    client = Client(waits=True)
    await client.sends(CHUNKED + b"0\r\nauthorization: Bearer x\r\n\r\n")
    assert client.protocol.headers == [(b"host", b"here"), (b"transfer-encoding", b"chunked")]


async def test_nothing_follows_the_refusal_of_a_body() -> None:
    client = Client(waits=True, begins_late=True)
    await client.sends(CHUNKED, b"no length\r\n")
    client.release.set()
    await client.settles()
    assert client.has_answer(400)
    assert not client.transport.has_late_write


async def test_each_time_that_a_client_is_behind_counts_for_itself() -> None:
    client = Client(waits=True)
    await client.sends(GET)
    for time in (0.0, WRITE_TIMEOUT_S + 1):
        client.protocol.write_chunk(b"x" * (2 * HIGH_WATER + int(time)))
        client.protocol.check(client.start + time)
        assert not client.transport.is_lost
        client.transport.read(3 * HIGH_WATER)


@pytest.mark.parametrize("kind", [Client, TlsClient])
@pytest.mark.parametrize("taken", [0, 1, LEAST_TAKEN_BYTES])
@pytest.mark.parametrize("closes", [True, False])
async def test_a_client_that_takes_next_to_nothing_is_cut_off_and_a_slow_one_is_not(
    closes: bool, taken: int, kind: type[Client]
) -> None:
    client = kind(answer=b"x" * (20 * HIGH_WATER))
    head = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") if closes else GET
    await client.sends(head)
    assert client.transport.unread > 3 * HIGH_WATER
    start = client.start
    for minute in range(1, 6):
        client.start = start + minute * (WRITE_TIMEOUT_S - 1)
        client.protocol.check(client.start)
        client.transport.read(taken)
    assert client.transport.is_lost is (taken < LEAST_TAKEN_BYTES)


async def test_an_idle_client_does_not_hold_up_the_end_of_its_tls() -> None:
    client = TlsClient()
    await client.sends(GET)
    client.transport.read(HIGH_WATER)
    client.protocol.shutdown()
    client.transport.read(HIGH_WATER)
    assert not client.transport.is_lost
    client.protocol.check(client.start)
    await client.settles()
    assert client.transport.is_lost


async def test_a_client_that_ends_tls_and_reads_nothing_is_cut_off() -> None:
    client = TlsClient(waits=True)
    await client.sends(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    client.protocol.write_chunk(b"x" * HIGH_WATER)
    client.says_goodbye()
    client.release.set()
    await client.settles()  # the end of the answer closes the transport for the second time
    client.protocol.write_chunk(b"more")
    client.after(WRITE_TIMEOUT_S + 2)
    await client.settles()
    assert client.transport.is_lost
    assert not client.state.connections


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000, 431),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 100, 431),
        (b"GET /", b"y" * 1000, 431),
        (CHUNKED, b"5;" + b"x" * 1000, 431),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 100, 431),
        (CHUNKED + b"0\r\nx: ", b"y" * 1000, 431),
        (b"\r\n", b"\r\n" * 500, 431),
        (b"", b"\x16\x03\x01", 400),
    ],
)
async def test_bytes_that_end_no_part_of_a_request_are_bounded(start: bytes, piece: bytes, status: int) -> None:
    client = Client(waits=True)
    client.release.clear()
    app_waits = start.startswith(CHUNKED)
    await client.sends(start)
    num_sent = 0
    while not client.protocol._drops and num_sent < 4 * MAX_HEAD_BYTES:
        await client.sends(piece)
        num_sent += len(piece)
    assert num_sent <= MAX_HEAD_BYTES + 2 * len(piece)
    assert len(client.protocol.headers or ()) <= MAX_HEADERS
    if app_waits:  # its answer has begun; nothing may be written into it
        assert b" 431 " not in client.transport.written
    else:
        assert client.has_answer(status)


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES + 6_000, 1_000_000])
async def test_a_long_body_is_not_taken_for_a_head(num_bytes: int) -> None:
    head = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % num_bytes
    whole = head + b"x" * num_bytes
    for cut in (0, len(head), len(head) + num_bytes // 2, len(whole) - 1):
        client = Client(waits=True)
        await client.sends(whole[:cut], whole[cut:])
        assert len(client.body) == num_bytes
        client.release.set()
        await client.settles()
        assert client.has_answer(200)


async def test_a_head_in_one_piece_has_the_same_bounds() -> None:
    for head in (b"x: " + b"y" * MAX_HEAD_BYTES, b"x: y\r\n" * (MAX_HEADERS + 1)):
        client = Client()
        await client.sends(b"GET / HTTP/1.1\r\n" + head + b"\r\n\r\n")
        assert client.has_answer(431)
        assert b"headers_too_large" in client.transport.written
        assert client.num_calls == 0


@pytest.mark.parametrize("behind", [GET, GET * 5000, b"GET / HT", b"\x00garbage", b"x" * 500_000])
@pytest.mark.parametrize("at_once", [True, False])
async def test_what_comes_behind_an_open_answer_is_dropped_and_hides_no_leaving(behind: bytes, at_once: bool) -> None:
    ends, leaves = Client(b"the end", waits=True), Client(waits=True)
    for client in (ends, leaves):
        await client.sends(*([GET + behind] if at_once else [GET, behind]))
        assert not client.transport.is_reading_paused, "a client that leaves would not be noticed"
    ends.release.set()
    await ends.settles()
    ends.transport.read(HIGH_WATER)
    assert ends.transport.written.endswith(b"7\r\nthe end\r\n0\r\n\r\n")
    assert (ends.num_calls, ends.transport.is_lost) == (1, True)
    leaves.transport.abort()
    await leaves.settles()
    assert leaves.has_left


async def test_an_empty_line_behind_a_body_does_not_hurt_the_answer() -> None:
    client = Client(b"whole", waits=True)
    await client.sends(GET, b"\r\n")
    client.after(10 * HEAD_TIMEOUT_S)
    client.release.set()
    await client.settles()
    assert b"whole" in client.transport.written
    await client.sends(GET)
    assert client.num_calls == 2


@pytest.mark.parametrize("length", [b"content-length: 5", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize("closes", [True, False])
async def test_a_client_that_asks_for_another_protocol_is_answered_in_this_one(
    length: bytes, size: int, closes: bool
) -> None:
    client = Client(b"whole", waits=True)
    options = b"Upgrade, HTTP2-Settings" + b", Close" * closes
    asks = b"connection: %b\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n%b\r\n\r\n" % (options, length)
    request = b"POST /a HTTP/1.1\r\n" + asks + (b"5\r\nhello\r\n0\r\n\r\n" if b"chunked" in length else b"hello")
    await client.sends(*(request[start : start + size] for start in range(0, len(request), size)))
    assert client.body == b"hello"
    client.release.set()
    await client.settles()
    assert b"whole" in client.transport.written
    await client.sends(GET)
    assert client.num_calls == (1 if closes else 2)


async def test_http_1_0_gets_no_chunks() -> None:
    client = Client(b" the end", waits=True)
    await client.sends(b"GET / HTTP/1.0\r\n\r\n")
    assert client.connection is not None
    client.connection.write_chunk(b"part")
    client.release.set()
    await client.settles()
    head, body = client.transport.written.split(b"\r\n\r\n")
    assert body == b"part the end"
    assert b"transfer-encoding" not in head
    assert client.transport.is_closed


@pytest.mark.parametrize("happens", ["the client reads", "the client leaves"])
async def test_every_writer_that_waits_for_room_is_called(happens: str) -> None:
    client = Client(waits=True)
    await client.sends(GET)
    client.protocol.write_chunk(b"x" * (HIGH_WATER + 1))
    assert client.protocol.is_full
    called: list[int] = []
    for number in range(3):
        client.protocol.when_room(lambda number=number: called.append(number))  # type: ignore[misc]
    if happens == "the client reads":
        client.transport.read(2 * HIGH_WATER)
    else:
        client.transport.abort()
    assert called == [0, 1, 2]


class SilentTlsClient(TlsClient):
    def shakes_hands(self) -> None:
        """Never."""


@pytest.mark.parametrize("ends", ["at its deadline", "by the client", "by the server"])
async def test_a_handshake_counts_as_a_connection_and_has_the_deadline_of_a_head(ends: str) -> None:
    client = SilentTlsClient()
    assert len(client.state.connections) == 1
    client.after(HEAD_TIMEOUT_S - 1)
    assert not client.transport.is_closed
    match ends:
        case "at its deadline":
            client.after(HEAD_TIMEOUT_S + 2)
        case "by the client":
            client.transport.abort()
        case "by the server":
            client.protocol.shutdown()
    assert client.transport.is_lost
    assert not client.state.connections


async def test_connections_and_handshakes_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 0)
    client, silent = Client(), SilentTlsClient()
    assert client.has_answer(503)
    assert client.transport.is_closed
    assert silent.transport.is_lost
    assert not silent.state.connections


PIECES = [
    GET, GET[:-2], CHUNKED, b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"\r\n",
    b"5\r\nhello\r\n", b"5;a=b\r\nhel", b"0\r\n\r\n", b"0\r\nx: y\r\n", b"x: y\r\n", b"x" * 5000, b"\x00\xff",
    b"G", b" ", b":", b"\n", b"expect: 100-continue\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n\r\n",
    b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n", b"HEAD / HTTP/1.1\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n",
]  # fmt: skip
EVENTS: list[Callable[[Client], object]] = [
    lambda client: client.release.set(),
    lambda client: client.release.clear(),
    lambda client: client.transport.read(70_000),
    lambda client: (
        client.protocol.write_chunk(b"x" * 40_000)
        if client.connection and not client.protocol.is_full and not client.transport.is_closed and _streams(client)
        else None
    ),
]


def _streams(client: Client) -> bool:
    cycle = client.protocol.cycle
    return cycle.response_started and not cycle.response_complete


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(EVENTS)), max_size=30))
async def test_no_client_holds_a_connection_once_its_requests_are_answered(
    events: list[bytes | Callable[[Client], object]],
) -> None:
    client = Client(b"x" * 30_000)
    for event in events:
        if callable(event):
            event(client)
            await client.settles()
        else:
            await client.sends(event)
        assert client.protocol._quiet_bytes <= MAX_HEAD_BYTES
        assert client.num_calls <= client.state.total_requests + 1, "one request is open at a time"
    client.release.set()
    await client.settles()
    client.start = asyncio.get_running_loop().time()
    client.after(BODY_LIMIT_S + KEEP_ALIVE_S + HEAD_TIMEOUT_S + 2 * WRITE_TIMEOUT_S)
    assert client.transport.is_lost
    assert not client.transport.has_late_write
    assert not client.state.connections
