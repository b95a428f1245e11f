"""An HTTP client that only counts: streamed answers of OpenAI's API, one connection each."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

RECEIVE_BYTES = 1 << 18
EVENT = b"data: {"  # begins each event but the last one, "data: [DONE]"
END = b"\r\n0\r\n\r\n"  # of a response
TIMEOUT_S = 90.0
OPTIONS = {"stream": True, "temperature": 0, "ignore_eos": True}


class Refused(RuntimeError):
    """The server answered a request of the load with an error."""


class HttpStream:
    """Counts events and ends in the bytes of the answers.

    `body`: of each request, beside `OPTIONS` and its length. `tokens_again`: as soon as an answer ends, ask again for
    so many tokens; 0 = no more. `times`: where to note the arrival of each event. Raises `Refused`, or `RuntimeError`
    if the server closes the connection.
    """

    def __init__(
        self, port: int, path: str, body: Mapping[str, Any], tokens_again: int = 0, times: list[float] | None = None
    ) -> None:
        self.num_events = self.num_ended = 0
        self._times = times
        self._path, self._body, self._tokens_again = path, body, tokens_again
        self._tail = b""
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, max_tokens: int) -> None:
        body = json.dumps({**self._body, **OPTIONS, "max_tokens": max_tokens}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def receive(self) -> None:
        received = self.socket.recv(RECEIVE_BYTES)
        if not received:
            raise RuntimeError("the server closed a connection")
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

    def close(self) -> None:
        self.socket.close()
