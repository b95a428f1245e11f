"""The writer of a token stream joins what waits into one message, and gives up a router that does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from core.errors import WorkerUnavailable
from core.step import SampledToken
from decode_worker import token_stream
from decode_worker.token_stream import TokenStreamWriter
from tandem_client.stubs import worker_pb2


class Router:
    """Reads while `reading` is set."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[worker_pb2.StepTokens] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self.num_writes = 0

    async def write(self, message: worker_pb2.StepTokens) -> None:
        self.num_writes += 1
        await self.reading.wait()
        self.messages.put_nowait(message)

    async def next(self) -> list[tuple[int, int, int]]:
        async with asyncio.timeout(5):
            message = await self.messages.get()
        return list(zip(message.calls, message.indexes, message.token_ids, strict=True))


@contextlib.asynccontextmanager
async def opened(*, reads: bool = True) -> AsyncIterator[tuple[Router, TokenStreamWriter, asyncio.Task[None]]]:
    """A stream whose first messages the router has read."""
    router, stream = Router(), TokenStreamWriter("router-1")
    stream.add(9, 0, SampledToken(7))
    writer = asyncio.create_task(stream.write_all(router.write))
    assert [await router.next(), await router.next()] == [[], [(9, 0, 7)]], "the empty one says that the stream is open"
    if not reads:
        router.reading.clear()
    yield router, stream, writer
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)


async def test_tokens_of_one_step_are_one_message_as_are_those_of_steps_that_end_while_a_write_waits() -> None:
    async with opened(reads=False) as (router, stream, _):
        for call in range(256):
            stream.add(call, 0, SampledToken(10))
        await asyncio.sleep(0.01)
        for index in (1, 2, 3):
            stream.add(1, index, SampledToken(10 + index))
            await asyncio.sleep(0)
        router.reading.set()
        assert await router.next() == [(call, 0, 10) for call in range(256)]
        assert await router.next() == [(1, 1, 11), (1, 2, 12), (1, 3, 13)]
        assert router.num_writes == 4


async def test_log_probabilities_stand_beside_the_tokens_that_have_them() -> None:
    async with opened() as (router, stream, _):
        stream.add(1, 0, SampledToken(10))
        stream.add(2, 0, SampledToken(20, -0.5, ((20, -0.5), (21, -1.5))))
        stream.add(3, 0, SampledToken(30))
        stream.add(4, 0, SampledToken(40, -0.25))
        message = await router.messages.get()
        assert list(message.token_ids) == [10, 20, 30, 40]
        assert list(message.logprob_places) == [1, 3]
        assert [found.logprob for found in message.logprobs] == [-0.5, -0.25]
        assert [entry.token_id for entry in message.logprobs[0].top] == [20, 21]


async def test_a_router_with_too_many_waiting_tokens_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "MAX_PENDING", 100)
    async with opened(reads=False) as (_, stream, writer):
        for index in range(100):
            stream.add(1, index, SampledToken(1))
            await asyncio.sleep(0)
        assert not writer.done(), "up to the bound the router may take its time"
        for index in range(100, 300):
            stream.add(1, index, SampledToken(1))
        async with asyncio.timeout(5):
            with pytest.raises(WorkerUnavailable, match="router-1 reads its tokens too slowly"):
                await writer
        assert len(stream.take().calls) == 0, "nothing is kept for a lost stream"


async def test_log_probabilities_count_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "MAX_PENDING", 100)
    stream = TokenStreamWriter("router-1")
    top = tuple((token_id, -1.0) for token_id in range(20))
    for index in range(10):
        stream.add(1, index, SampledToken(1, -1.0, top))
    with pytest.raises(WorkerUnavailable):
        await stream.write_all(Router().write)


@pytest.mark.parametrize("num_more", [0, 3])
async def test_a_router_that_reads_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch, num_more: int) -> None:
    """More tokens than may wait come when the timer has cancelled the write, and the write has not ended yet."""
    monkeypatch.setattr(token_stream, "MAX_PENDING", 1)
    monkeypatch.setattr(token_stream, "MAX_WRITE_S", 0.01)
    async with opened(reads=False) as (_, stream, writer):
        stream.add(1, 0, SampledToken(1))
        async with asyncio.timeout(5):
            while stream._write_limit is None or not stream._write_limit.expired():
                await asyncio.sleep(0)
        assert not writer.done()
        for index in range(1, 1 + num_more):
            stream.add(1, index, SampledToken(1))
        async with asyncio.timeout(5):
            with pytest.raises(WorkerUnavailable, match="too slowly"):
                await writer


@pytest.mark.parametrize("waiting", [[], [(1, 0, 10)]])
async def test_the_tokens_that_wait_are_written_before_the_stream_ends(waiting: list[tuple[int, int, int]]) -> None:
    async with opened() as (router, stream, writer):
        for call, index, token_id in waiting:
            stream.add(call, index, SampledToken(token_id))
        stream.end(WorkerUnavailable("this worker is stopping"))
        async with asyncio.timeout(5):
            with pytest.raises(WorkerUnavailable, match="stopping"):
                await writer
        assert [await router.next() for _ in waiting] == [waiting] * bool(waiting)
