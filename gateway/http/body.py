"""The body of a request, read before a route runs: inside a limit of bytes, a deadline, a least rate and a shared room.

A body over the limit is refused as soon as its length, or the part that has arrived, exceeds the limit. All bodies that
are being read share `MAX_READING_BYTES`. When they need more, one is given up: of the address that holds most, and of
its keys the one that holds most, the largest. So a client that holds many bodies back costs its own requests, not those
of others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TypeVar

from starlette.types import Receive, Scope

from core.errors import QueueFull
from gateway.errors import ApiError, ClientGone
from gateway.http.http_protocol import BODY_TIMEOUT_S

MAX_READING_BYTES = 64 * 2**20  # incomplete bodies of a process; beyond: the largest gets status 503
MAX_WAITING_BYTES = 512 * 2**20  # bodies of a process that wait for a thread; beyond: status 429
FIRST_BYTES_S = 10.0  # time of a body, and a second for each `LEAST_BYTES_PER_S` of it; beyond: status 408
LEAST_BYTES_PER_S = 16 * 1024


T = TypeVar("T")


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._reading: set[_Body] = set()
        self._num_bytes = 0  # of all in `_reading`
        self._held: dict[tuple[str, bytes], int] = {}  # of these, by address and key
        self._held_by_host: dict[str, int] = {}

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises `ApiError` and `ClientGone`."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()
        body = _Body(_owner(scope))
        self._reading.add(body)
        try:
            async with body.deadline:
                while await body.take(receive):
                    self._count(body)
        except TimeoutError:
            raise body.refusal() from None
        finally:
            self._forget(body)
        return b"".join(body.parts)

    def _count(self, body: _Body) -> None:
        if body.size > self._max_body_bytes:
            raise self._too_large()
        if body.is_given_up:
            return
        self._hold(body, body.size)
        if self._num_bytes > MAX_READING_BYTES:
            largest = self._largest()
            self._forget(largest)
            largest.give_up()

    def _largest(self) -> _Body:
        host = max(self._held_by_host, key=self._held_by_host.__getitem__)
        owner = max((each for each in self._held if each[0] == host), key=self._held.__getitem__)
        return max((body for body in self._reading if body.owner == owner), key=lambda body: body.counted)

    def _forget(self, body: _Body) -> None:
        self._reading.discard(body)
        self._hold(body, 0)

    def _hold(self, body: _Body, num_bytes: int) -> None:
        more, body.counted = num_bytes - body.counted, num_bytes
        self._num_bytes += more
        _add(self._held, body.owner, more)
        _add(self._held_by_host, body.owner[0], more)

    def _too_large(self) -> ApiError:
        message = f"body: larger than {self._max_body_bytes} bytes (gateway.max_body_bytes)"
        return ApiError(413, message, code="request_too_large")


class WaitingBodies:
    """The bodies that are complete and wait for a thread, with the one that it reads.

    An address may hold half of the room if it is alone, and always as much as is free. So may a key of the address in
    half of the room. So there is room left for a client that holds little.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._held: dict[tuple[str, bytes], int] = {}  # by address and key
        self._held_by_host: dict[str, int] = {}

    @contextlib.contextmanager
    def hold(self, scope: Scope, num_bytes: int) -> Iterator[None]:
        """Raises `QueueFull`."""
        owner = _owner(scope)
        of_host = self._held_by_host.get(owner[0], 0)
        free = MAX_WAITING_BYTES - self._num_bytes - of_host
        free_in_half = MAX_WAITING_BYTES // 2 - of_host - self._held.get(owner, 0)
        if num_bytes > min(free, free_in_half):
            raise QueueFull(f"bodies of {of_host} bytes from this client wait for a thread; too many for another one")
        self._add(owner, num_bytes)
        try:
            yield
        finally:
            self._add(owner, -num_bytes)

    def _add(self, owner: tuple[str, bytes], num_bytes: int) -> None:
        self._num_bytes += num_bytes
        _add(self._held, owner, num_bytes)
        _add(self._held_by_host, owner[0], num_bytes)


def _owner(scope: Scope) -> tuple[str, bytes]:
    keys = (value for name, value in scope["headers"] if name == b"authorization")
    return (scope.get("client") or ("", 0))[0], next(keys, b"")


def _add(held: dict[T, int], owner: T, num_bytes: int) -> None:
    held[owner] = held.get(owner, 0) + num_bytes
    if not held[owner]:
        del held[owner]


class _Body:
    def __init__(self, owner: tuple[str, bytes]) -> None:
        self.owner = owner  # its address and key
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
