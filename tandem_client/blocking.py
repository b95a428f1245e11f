"""The blocking client runs the coroutines of `AsyncClient` over a `BlockingChannel`, without an event loop.

Each method of a `BlockingChannel` waits inside itself, in the thread that calls it. So none of these coroutines ever
suspends, and `finish` drives one to its end. Ctrl-C, deadlines, threads and forks thus behave as in any gRPC program.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import grpc

from tandem_client.retries import SystemClock

T = TypeVar("T")


class BlockingChannel:
    """A blocking channel with the methods of a `grpc.aio.Channel` that stubs and `AsyncClient` use."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        call = self._channel.unary_unary(*args, **options)

        async def answer(request: Any, **options: Any) -> Any:
            return call(request, **options)

        return answer

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., BlockingCall]:
        call = self._channel.unary_stream(*args, **options)
        return lambda request, **options: BlockingCall(call(request, **options))

    async def close(self, _: float | None) -> None:
        self._channel.close()


class BlockingCall(AsyncIterator[Any]):
    """The messages of one call, read from a blocking `grpc.Call`."""

    def __init__(self, responses: Any) -> None:
        self._responses: Iterator[Any] = responses
        self.cancel: Callable[[], bool] = responses.cancel

    async def __anext__(self) -> Any:
        try:
            return next(self._responses)
        except StopIteration:
            raise StopAsyncIteration from None


class BlockingClock(SystemClock):
    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs it


BLOCKING_CLOCK = BlockingClock()


def finish(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends. Raises what the coroutine raises."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"{call} suspended: the clock of a Client must block in `sleep`")


def iterate(responses: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The items of an asynchronous generator that never suspends. Closing the iterator closes it."""
    try:
        while True:
            try:
                response = finish(responses.__anext__())
            except StopAsyncIteration:
                return
            yield response
    finally:
        finish(responses.aclose())
