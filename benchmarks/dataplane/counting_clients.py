"""Clients that only count, for loads that a Python client cannot take: gRPC, many streaming calls on few connections,
and HTTP, one stream of events on each.

grpc.aio takes about 60 us to read one message, more than the router takes to send one. So the load client speaks the
few frames of HTTP/2 (RFC 9113) that a server-streaming call needs, and leaves the messages packed:

    our side:    preface, SETTINGS with the largest windows, HEADERS and DATA with the request, acknowledgements
    their side:  DATA frames, cut into gRPC messages (1 byte of flags, 4 bytes of length); the end of each stream

The windows hold 2 GB for each connection, so no window has to be enlarged during a run.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5  # names of settings
FRAME_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 5.0
EVENT = b"data: {"  # begins each event but the last one, "data: [DONE]"
END = b"\r\n0\r\n\r\n"  # of a response
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of the sea."}], "stream": True, "temperature": 0,
    "ignore_eos": True,
}  # fmt: skip

OnMessage = Callable[[int, bytes], None]  # (stream, message)


class Reader(Protocol):
    @property
    def socket(self) -> socket.socket: ...
    def receive(self) -> None: ...


class LoadFailed(Exception):
    """The server closed a connection or ended a stream before the load was done."""


class Connection:
    """One HTTP/2 connection. `on_message` takes each whole message; `ended` has the streams that the server ended."""

    def __init__(self, address: str, on_message: OnMessage) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._on_message = on_message
        self._next_stream = 1
        self._unread = bytearray()
        self._parts: dict[int, bytearray] = {}  # by stream: the bytes of an incomplete message
        self.ended: set[int] = set()
        self.socket = _connect(host, int(port))
        settings = struct.pack(">HIHI", INITIAL_WINDOW_SIZE, MAX_WINDOW, MAX_FRAME_SIZE, FRAME_BYTES)
        enlarge = struct.pack(">I", MAX_WINDOW - DEFAULT_WINDOW)
        self.socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, enlarge))

    def call(self, path: str, *messages: bytes) -> int:
        """Start a call with all of its request messages. Returns the number of its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = (
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self._address),
            ("content-type", "application/grpc"), ("te", "trailers"),
        )  # fmt: skip
        headers = b"".join(_literal(name, value) for name, value in fields)
        body = b"".join(b"\0" + struct.pack(">I", len(message)) + message for message in messages)
        self.socket.sendall(_frame(HEADERS, END_HEADERS, stream, headers) + _frame(DATA, END_STREAM, stream, body))
        return stream

    def receive(self) -> None:
        """Read what has arrived, and hand over its messages. Raises `LoadFailed` at the end of the connection."""
        received = self.socket.recv(RECEIVE_BYTES)
        if not received:
            raise LoadFailed("the server closed a connection")
        unread = self._unread
        unread += received
        start, size = 0, len(unread)
        while size - start >= 9:
            length = (unread[start] << 16) | (unread[start + 1] << 8) | unread[start + 2]
            end = start + 9 + length
            if end > size:
                break
            stream = int.from_bytes(unread[start + 5 : start + 9], "big")
            self._take(unread[start + 3], unread[start + 4], stream, bytes(unread[start + 9 : end]))
            start = end
        del unread[:start]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._take_data(stream, payload)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.socket.sendall(_frame(kind, ACK, 0, b"" if kind == SETTINGS else payload))
        elif kind == GOAWAY:
            raise LoadFailed(f"the server ends the connection: {payload[8:].decode(errors='replace')}")
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)

    def _take_data(self, stream: int, payload: bytes) -> None:
        before = self._parts.pop(stream, None)
        data = payload if before is None else bytes(before + payload)
        start = 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if end > len(data):
                break
            self._on_message(stream, data[start + 5 : end])
            start = end
        if start < len(data):
            self._parts[stream] = bytearray(data[start:])


class Refused(RuntimeError):
    """The server answered a request of the load with an error."""


class HttpStream:
    """Streamed answers of OpenAI's API, on a connection of its own: counts events and ends in their bytes.

    `tokens_again`: as soon as an answer ends, ask again for so many tokens; 0 = no more. `times`: where to note the
    arrival of each event. Raises `Refused`, or `LoadFailed` if the server closes the connection.
    """

    def __init__(self, port: int, model: str, tokens_again: int = 0, times: list[float] | None = None) -> None:
        self.num_events = self.num_ended = 0
        self._times, self._tokens_again = times, tokens_again
        self._body = CHAT | {"model": model}
        self._tail = b""
        self.socket = _connect("127.0.0.1", port)

    def send(self, max_tokens: int) -> None:
        body = json.dumps(self._body | {"max_tokens": max_tokens}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def receive(self) -> None:
        received = self.socket.recv(RECEIVE_BYTES)
        if not received:
            raise LoadFailed("the server closed a connection")
        data = self._tail + received
        if b"HTTP/1.1 " in data and b"HTTP/1.1 200" not in data:
            raise Refused(f"the server refuses the load: {data[:500].decode(errors='replace')}")
        num_events = data.count(EVENT)
        self.num_events += num_events
        if self._times is not None:
            self._times += [time.monotonic()] * num_events
        # The end of the data may hold the start of an event or of the response's end, but no whole event.
        ended = END in data
        self._tail = b"" if ended else data[-(len(EVENT) - 1) :]
        self.num_ended += ended
        if ended and self._tokens_again:
            self.send(self._tokens_again)


def receive_for(readers: Sequence[Reader], seconds: float, enough: Callable[[], bool] = lambda: False) -> float:
    """Receive on all readers for `seconds`, or until `enough`. Returns the seconds that have passed."""
    selector = selectors.DefaultSelector()
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    start = time.perf_counter()
    try:
        while (left := start + seconds - time.perf_counter()) > 0 and not enough():
            for key, _ in selector.select(left):
                key.data.receive()
    finally:
        selector.close()
    return time.perf_counter() - start


def _connect(host: str, port: int) -> socket.socket:
    found = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without compression (RFC 7541, section 6.2.2)."""
    encoded = [text.encode() for text in (name, value)]
    assert all(len(text) < 127 for text in encoded), "a longer length needs more than one byte"
    return b"\0" + b"".join(bytes((len(text),)) + text for text in encoded)
