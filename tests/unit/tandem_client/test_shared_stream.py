"""Calls that share a stream: joined tokens, deadlines, cancellation, and streams that end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tandem_client import NO_RETRY, AsyncClient, CallFailed, GenerateRequest
from tandem_client.shared_stream import MAX_JOINED_CHARS, MAX_SHARED_REQUEST_BYTES
from tests.support.waiting import until

TIMEOUT_S = 20.0


class Router(inference_pb2_grpc.InferenceServicer):
    """Hands the starts, cancels and streams to the test, which writes the events."""

    def __init__(self) -> None:
        self.starts: list[inference_pb2.StartCall] = []
        self.cancels: list[int] = []
        self.streams: list[Any] = []
        self.alone: list[inference_pb2.GenerateRequest] = []
        self.end = asyncio.Event()  # of the stream
        self.breaks = False  # at its end

    async def GenerateMany(self, requests: Any, context: Any) -> None:
        self.streams.append(context)
        reading = asyncio.create_task(self._read(requests))
        try:
            await self.end.wait()
            self.end.clear()
            if self.breaks:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as gRPC itself: no trailers
        finally:
            reading.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if message.HasField("start"):
                self.starts.append(message.start)
            else:
                self.cancels.append(message.cancel)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        self.alone.append(request)
        await context.write(inference_pb2.GenerateResponse(finished=inference_pb2.Finished()))

    async def write(self, *events: inference_pb2.CallEvent) -> None:
        await self.streams[-1].write(inference_pb2.GenerateManyResponse(events=events))

    async def until_started(self, count: int) -> None:
        await until(lambda: len(self.starts) == count, f"{count} calls have started", TIMEOUT_S)


def token(call: int, text: str, choice: int = 0) -> inference_pb2.CallEvent:
    chunk = inference_pb2.TokenChunk(choice=choice, text=text, token_ids=[len(text)])
    return inference_pb2.CallEvent(call=call, response=inference_pb2.GenerateResponse(tokens=chunk))


def end(call: int, **ended: Any) -> inference_pb2.CallEvent:
    return inference_pb2.CallEvent(call=call, ended=inference_pb2.CallEnded(**ended))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Router, AsyncClient]]:
    router, server = Router(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retry=NO_RETRY, shares_stream=True) as client:
            yield router, client
    finally:
        await server.stop(0)


async def read(client: AsyncClient, text: str, timeout_s: float = TIMEOUT_S) -> list[str]:
    return [r.tokens.text async for r in client.generate(GenerateRequest(text=text), timeout_s)]


async def test_calls_share_one_stream_and_each_gets_its_own_messages() -> None:
    async with serving() as (router, client):
        calls = [asyncio.create_task(read(client, text)) for text in ("a", "b")]
        await router.until_started(2)
        assert [start.request.text for start in router.starts] == ["a", "b"]
        assert all(0 < start.timeout_ms <= TIMEOUT_S * 1e3 for start in router.starts)
        first, second = (start.call for start in router.starts)
        await router.write(token(second, "b0"), token(first, "a0"))
        await router.write(token(99, "of nobody"), end(first), token(second, "b1"), end(second))
        texts = await asyncio.gather(*calls)
        assert ["".join(pieces) for pieces in texts] == ["a0", "b0b1"]
        assert len(router.streams) == 1
        assert router.cancels == []


async def test_tokens_that_nobody_reads_are_joined_up_to_a_limit() -> None:
    async with serving() as (router, client):
        responses = client.generate(GenerateRequest(text="a"), TIMEOUT_S)
        first = asyncio.create_task(anext(responses))
        await router.until_started(1)
        await router.write(token(1, "0"))
        assert (await first).tokens.text == "0"
        half = "x" * (MAX_JOINED_CHARS // 2)
        later = [token(1, text) for text in ("1", "2")] + [token(1, "other choice", choice=1)]
        await router.write(*later, token(1, half, choice=1), token(1, half, choice=1), end(1))
        other = asyncio.create_task(read(client, "b"))
        await router.until_started(2)
        await router.write(end(2))
        await other  # so the events above have arrived
        rest = [response.tokens async for response in responses]
        assert [(chunk.choice, chunk.text) for chunk in rest] == [(0, "12"), (1, "other choice" + half), (1, half)]
        assert list(rest[0].token_ids) == [1, 1]


async def test_a_call_that_is_left_early_is_cancelled() -> None:
    async with serving() as (router, client):
        responses = client.generate(GenerateRequest(text="a"), TIMEOUT_S)
        first = asyncio.create_task(anext(responses))
        await router.until_started(1)
        await router.write(token(1, "0"))
        await first
        await responses.aclose()
        await until(lambda: router.cancels == [1], "the router hears of it", TIMEOUT_S)


async def test_the_deadline_of_a_call_ends_it_alone() -> None:
    async with serving() as (router, client):
        other = asyncio.create_task(read(client, "b"))
        await router.until_started(1)
        with pytest.raises(CallFailed, match=r"no answer from .* within 0\.1 s") as failed:
            await read(client, "a", timeout_s=0.1)
        assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: router.cancels == [2], "the router hears of it", TIMEOUT_S)
        await router.write(token(1, "b0"), end(1))
        assert await other == ["b0"]


async def test_a_stream_that_breaks_ends_its_calls_and_the_next_call_opens_another() -> None:
    async with serving() as (router, client):
        begun, waiting = (asyncio.create_task(read(client, text)) for text in ("begun", "waits"))
        await router.until_started(2)
        await router.write(token(1, "part"))
        router.breaks = True
        router.end.set()
        failures = await asyncio.gather(begun, waiting, return_exceptions=True)
        assert all(isinstance(failure, CallFailed) and failure.retryable for failure in failures)
        assert "in the middle of the answer" in str(failures[0])
        again = asyncio.create_task(read(client, "again"))
        await router.until_started(3)
        assert len(router.streams) == 2
        await router.write(end(router.starts[2].call))
        assert await again == []


async def test_a_call_that_a_stopping_router_did_not_take_starts_in_another_stream() -> None:
    async with serving() as (router, client):
        open_call = asyncio.create_task(read(client, "open"))
        await router.until_started(1)
        refused = asyncio.create_task(read(client, "refused"))
        await router.until_started(2)
        old = router.streams[0]
        await router.write(end(2, not_started=True, status_code=14))
        await router.until_started(3)
        assert router.starts[2].request.text == "refused"
        assert router.streams[1] is not old
        await router.write(token(router.starts[2].call, "served"), end(router.starts[2].call))
        assert await refused == ["served"]
        events = [token(1, "old"), end(1)]
        await old.write(inference_pb2.GenerateManyResponse(events=events))
        assert await open_call == ["old"]


async def test_a_call_without_events_in_a_stream_that_ends_well_starts_in_another() -> None:
    async with serving() as (router, client):
        unread = asyncio.create_task(read(client, "unread"))
        await router.until_started(1)
        router.end.set()
        await router.until_started(2)
        assert len(router.streams) == 2
        await router.write(end(router.starts[1].call))
        assert await unread == []


async def test_a_call_that_no_router_takes_is_unavailable() -> None:
    async with serving() as (router, client):
        refused = asyncio.create_task(read(client, "refused"))
        for count in (1, 2, 3):
            await router.until_started(count)
            await router.write(end(router.starts[-1].call, not_started=True, status_code=14))
        with pytest.raises(CallFailed, match="stops") as failed:
            await refused
        assert (failed.value.code, failed.value.retryable) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_a_large_request_has_a_call_of_its_own() -> None:
    async with serving() as (router, client):
        await read(client, "x" * MAX_SHARED_REQUEST_BYTES)
        assert (len(router.alone), router.starts) == (1, [])


async def test_closing_the_client_ends_its_calls() -> None:
    async with serving() as (router, client):
        waiting = asyncio.create_task(read(client, "a"))
        await router.until_started(1)
    with pytest.raises(CallFailed, match="the client is closed"):
        async with asyncio.timeout(TIMEOUT_S):
            await waiting
