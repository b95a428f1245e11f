"""The body of a request, read before a route runs: inside a limit of bytes, a deadline, a least rate and a shared room.

A body over the limit is refused as soon as its length, or the part that has arrived, exceeds the limit. All bodies that
are being read share `MAX_READING_BYTES`. When they need more, bodies are given up: of the address that holds most, and
of its keys the one that holds most, the largest first. So a client that holds many bodies back costs its own requests,
not those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Receive, Scope

from core.errors import QueueFull
from gateway.errors import ApiError, ClientGone
from gateway.http.http_protocol import BODY_TIMEOUT_S
from gateway.http.owner import owner_of
from runtime.owner_ledger import Owner, OwnerLedger

MAX_READING_BYTES = 64 * 2**20  # incomplete bodies of a process; beyond: the largest gets status 503
MAX_WAITING_BYTES = 512 * 2**20  # bodies of a process that wait for a thread; beyond: status 429
FIRST_BYTES_S = 10.0  # time of a body, and a second for each `LEAST_BYTES_PER_S` of it; beyond: status 408
LEAST_BYTES_PER_S = 16 * 1024


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._reading: set[_Body] = set()
        self._ledger = OwnerLedger()  # of all in `_reading`

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises `ApiError` and `ClientGone`."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()
        body = _Body(owner_of(scope))
        self._reading.add(body)
        try:
            async with body.deadline:
                while await body.take(receive):
                    self._count(body)
        except TimeoutError:
            raise body.refusal() from None
        finally:
            self._forget(body)
        if body.size > self._max_body_bytes:  # by its last part
            raise self._too_large()
        return b"".join(body.parts)

    def _count(self, body: _Body) -> None:
        if body.size > self._max_body_bytes:
            raise self._too_large()
        if body.is_given_up:
            return
        self._hold(body, body.size)
        while self._ledger.total > MAX_READING_BYTES:
            owner = self._ledger.largest()
            largest = max((each for each in self._reading if each.owner == owner), key=lambda each: each.counted)
            self._forget(largest)
            largest.give_up()

    def _forget(self, body: _Body) -> None:
        self._reading.discard(body)
        self._hold(body, 0)

    def _hold(self, body: _Body, num_bytes: int) -> None:
        self._ledger.add(body.owner, num_bytes - body.counted)
        body.counted = num_bytes

    def check(self) -> None:
        self._ledger.check()
        assert self._ledger.total == sum(body.counted for body in self._reading) <= MAX_READING_BYTES

    def _too_large(self) -> ApiError:
        message = f"body: larger than {self._max_body_bytes} bytes (gateway.max_body_bytes)"
        return ApiError(413, message, code="request_too_large")


class WaitingBodies:
    """The bodies that are complete and wait for a thread, with the one that it reads. They share one room by the rule
    of `OwnerLedger.has_room`."""

    def __init__(self) -> None:
        self._ledger = OwnerLedger()

    @contextlib.contextmanager
    def hold(self, scope: Scope, num_bytes: int) -> Iterator[None]:
        """Raises `QueueFull`."""
        ledger, owner = self._ledger, owner_of(scope)
        if not ledger.has_room(owner, num_bytes, MAX_WAITING_BYTES):
            held = ledger.of_host(owner)
            raise QueueFull(f"bodies of {held} bytes from this client wait for a thread; too many for another one")
        ledger.add(owner, num_bytes)
        try:
            yield
        finally:
            ledger.add(owner, -num_bytes)

    def check(self) -> None:
        self._ledger.check()
        assert self._ledger.total <= MAX_WAITING_BYTES


class _Body:
    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._started_at = asyncio.get_running_loop().time()
        self.deadline = asyncio.timeout_at(self._started_at + FIRST_BYTES_S)
        self.parts: list[bytes] = []
        self.size = self.counted = 0
        self.is_given_up = False

    async def take(self, receive: Receive) -> bool:
        """Take the next part. False after the last one."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        self.parts.append(part)
        self.size += len(part)
        if not self.is_given_up:
            seconds = min(BODY_TIMEOUT_S, FIRST_BYTES_S + self.size / LEAST_BYTES_PER_S)
            self.deadline.reschedule(self._started_at + seconds)
        return bool(message.get("more_body", False))

    def give_up(self) -> None:
        self.is_given_up = True
        if not self.deadline.expired():
            self.deadline.reschedule(0.0)

    def refusal(self) -> ApiError:
        if self.is_given_up:
            message = f"body: those that are read exceed {MAX_READING_BYTES} bytes, most of them from this client"
            return ApiError(503, message, "server_error", code="overloaded", headers={"retry-after": "1"})
        message = f"body: not complete after {BODY_TIMEOUT_S:g} s, or slower than {LEAST_BYTES_PER_S} bytes/s"
        return ApiError(408, message, code="timeout")
