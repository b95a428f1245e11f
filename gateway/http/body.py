"""The body of a request, read before a route runs: inside a limit of bytes, a deadline, a least rate and a shared room.

A body over the limit is refused as soon as its length, or the part that has arrived, exceeds the limit. All bodies that
are being read share `MAX_READING_BYTES`. When they need more, the largest of them is given up: a client that holds many
bodies back costs its own requests, not those of others.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from gateway.errors import ApiError, ClientGone
from gateway.http.http_protocol import BODY_TIMEOUT_S

MAX_READING_BYTES = 64 * 2**20  # of all incomplete bodies of a process
FIRST_BYTES_S = 10.0  # a body has this time, and a second for each `LEAST_BYTES_PER_S` that have arrived
LEAST_BYTES_PER_S = 16 * 1024


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._reading: set[_Body] = set()
        self._num_bytes = 0  # of all in `_reading`

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises `ApiError` and `ClientGone`."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()
        body = _Body()
        self._reading.add(body)
        try:
            async with body.deadline:
                while await body.take(receive):
                    self._count(body)
        except TimeoutError:
            raise body.refusal() from None
        finally:
            self._reading.discard(body)
            self._num_bytes -= body.counted
        return b"".join(body.parts)

    def _count(self, body: _Body) -> None:
        if body.size > self._max_body_bytes:
            raise self._too_large()
        self._num_bytes += body.size - body.counted
        body.counted = body.size
        if self._num_bytes > MAX_READING_BYTES:
            max(self._reading, key=lambda body: body.counted).give_up()

    def _too_large(self) -> ApiError:
        message = f"body: larger than {self._max_body_bytes} bytes (gateway.max_body_bytes)"
        return ApiError(413, message, code="request_too_large")


class _Body:
    def __init__(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self.deadline = asyncio.timeout_at(self._started_at + FIRST_BYTES_S)
        self.parts: list[bytes] = []
        self.size = self.counted = 0
        self._is_given_up = False

    async def take(self, receive: Receive) -> bool:
        """Take the next part. False after the last one."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        self.parts.append(part)
        self.size += len(part)
        if not self._is_given_up:
            seconds = min(BODY_TIMEOUT_S, FIRST_BYTES_S + self.size / LEAST_BYTES_PER_S)
            self.deadline.reschedule(self._started_at + seconds)
        return bool(message.get("more_body", False))

    def give_up(self) -> None:
        self._is_given_up = True
        self.deadline.reschedule(0.0)

    def refusal(self) -> ApiError:
        if self._is_given_up:
            message = (
                f"body: the bodies that are being read exceed {MAX_READING_BYTES} bytes, and this one is the largest"
            )
            return ApiError(503, message, "server_error", code="overloaded", headers={"retry-after": "1"})
        message = f"body: not complete after {BODY_TIMEOUT_S:g} s, or slower than {LEAST_BYTES_PER_S} bytes/s"
        return ApiError(408, message, code="timeout")
