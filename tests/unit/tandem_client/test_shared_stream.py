"""Calls that share a stream: joined tokens, deadlines, cancellation, and streams that end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc.aio import Metadata

from core.config import MIN_MESSAGE_BYTES
from protos import inference_pb2, inference_pb2_grpc
from tandem_client import NO_RETRY, AsyncClient, CallFailed, GenerateRequest, GenerateResponse
from tandem_client.shared_stream import MAX_SHARED_REQUEST_BYTES, SharedStreams, can_share
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
    logprobs = [inference_pb2.TokenLogprobs(logprob=-1.0)]
    chunk = inference_pb2.TokenChunk(choice=choice, text=text, token_ids=[len(text)], logprobs=logprobs)
    return inference_pb2.CallEvent(call=call, response=inference_pb2.GenerateResponse(tokens=chunk))


def finished(call: int, choice: int) -> inference_pb2.CallEvent:
    response = inference_pb2.GenerateResponse(finished=inference_pb2.Finished(choice=choice))
    return inference_pb2.CallEvent(call=call, response=response)


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


async def begin(router: Router, client: AsyncClient) -> AsyncGenerator[GenerateResponse, None]:
    """The first call of a client, after its first token."""
    responses = client.generate(GenerateRequest(text="a"), TIMEOUT_S)
    first = asyncio.create_task(anext(responses))
    await router.until_started(1)
    await router.write(token(1, "0"))
    assert (await first).tokens.text == "0"
    return responses


async def test_calls_share_one_stream_and_each_gets_its_own_messages() -> None:
    async with serving() as (router, client):
        calls = [asyncio.create_task(read(client, text)) for text in ("a", "b")]
        await router.until_started(2)
        assert [start.request.text for start in router.starts] == ["a", "b"]
        assert all(0 < start.timeout_ms <= TIMEOUT_S * 1e3 for start in router.starts)
        first, second = (start.call for start in router.starts)
        await router.write(token(second, "b0"), token(first, "a0"))
        await router.write(token(99, "of an unknown call"), end(first), token(second, "b1"), end(second))
        texts = await asyncio.gather(*calls)
        assert ["".join(pieces) for pieces in texts] == ["a0", "b0b1"]
        assert len(router.streams) == 1
        assert router.cancels == []


async def test_tokens_wait_for_a_slow_reader_in_one_message_for_each_choice() -> None:
    async with serving() as (router, client):
        responses = await begin(router, client)
        for number in range(1, 6):
            await router.write(token(1, str(number)), token(1, str(number), choice=1))
        await router.write(finished(1, 0), token(1, "6", choice=1), finished(1, 1), end(1))
        await until_read(router, client)
        rest = [response async for response in responses]
        assert [(chunk.tokens.choice, chunk.tokens.text) for chunk in rest] == [
            (0, "12345"),
            (1, "123456"),
            (0, ""),
            (0, ""),
        ]
        assert [response.finished.choice for response in rest[2:]] == [0, 1]
        assert list(rest[1].tokens.token_ids) == [1] * 6
        assert len(rest[0].tokens.logprobs) == 5


async def until_read(router: Router, client: AsyncClient) -> None:
    """The client has read the messages so far: those of the next call come later."""
    other = asyncio.create_task(read(client, "other"))
    await router.until_started(len(router.starts) + 1)
    await router.write(end(router.starts[-1].call))
    await other


async def test_a_call_that_is_left_early_is_cancelled() -> None:
    async with serving() as (router, client):
        responses = await begin(router, client)
        await responses.aclose()
        await until(lambda: router.cancels == [1], "the router receives the cancel", TIMEOUT_S)


async def test_the_deadline_of_a_call_ends_it_alone() -> None:
    async with serving() as (router, client):
        other = asyncio.create_task(read(client, "b"))
        await router.until_started(1)
        with pytest.raises(CallFailed, match=r"no answer from .* within 0\.1 s") as failed:
            await read(client, "a", timeout_s=0.1)
        assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: router.cancels == [2], "the router receives the cancel", TIMEOUT_S)
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


async def test_a_call_of_a_stopping_router_is_still_cancelled() -> None:
    async with serving() as (router, client):
        responses = await begin(router, client)
        refused = asyncio.create_task(read(client, "refused"))
        await router.until_started(2)
        await router.write(end(2, not_started=True, status_code=14))
        await router.until_started(3)
        await responses.aclose()
        await until(lambda: router.cancels == [1], "the router receives the cancel", TIMEOUT_S)
        await router.write(end(router.starts[2].call))
        assert await refused == []


async def test_a_call_that_ends_before_it_is_sent_leaves_nothing_to_send() -> None:
    async with serving() as (router, client):
        client._shared._current()._writing.cancel()  # as if the router did not read
        for _ in range(20):
            with pytest.raises(CallFailed, match="no answer"):
                await read(client, "expires", timeout_s=0.001)
        stream = client._shared._current()
        assert (len(stream._unsent), len(stream._cancels), len(stream._calls)) == (0, 0, 0)
        assert router.starts == []


async def test_metadata_that_the_stream_cannot_carry_has_a_call_of_its_own() -> None:
    async with serving() as (router, client):
        for metadata in (
            [("authorization", "one"), ("authorization", "two")],
            [("big", "x" * MAX_SHARED_REQUEST_BYTES)],
        ):
            assert not can_share(GenerateRequest(text="a"), metadata)
        twice = [("authorization", "one"), ("authorization", "two")]
        assert [r async for r in client.generate(GenerateRequest(text="a"), TIMEOUT_S, twice)]
        assert (len(router.alone), router.starts) == (1, [])


def test_the_largest_request_of_a_shared_stream_fits_every_router() -> None:
    assert 2 * MAX_SHARED_REQUEST_BYTES <= MIN_MESSAGE_BYTES


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


class FailingStream:
    """A stream of which the test gives the messages, or the error."""

    def __init__(self) -> None:
        self.reads: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        found = await self.reads.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def write(self, _: Any) -> None: ...

    def cancel(self) -> None: ...


async def test_a_status_that_grpc_has_overwritten_counts_as_the_end_of_the_stream() -> None:
    """grpc/grpc#36066: the status of a stream that ends during a write is lost."""
    streams = [FailingStream(), FailingStream()]
    shared = SharedStreams("127.0.0.1:9", iter(streams).__next__)

    async def ask(text: str) -> list[str]:
        return [r.tokens.text async for r in shared.generate(GenerateRequest(text=text), TIMEOUT_S, ())]

    begun, unread = (asyncio.create_task(ask(text)) for text in ("begun", "unread"))
    lost = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "Internal error from Core", "")
    streams[0].reads.put_nowait(inference_pb2.GenerateManyResponse(events=[token(1, "part")]))
    streams[0].reads.put_nowait(lost)
    streams[1].reads.put_nowait(inference_pb2.GenerateManyResponse(events=[token(1, "served"), end(1)]))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(CallFailed, match="in the middle of the answer") as failed:
            await begun
        assert (failed.value.code, failed.value.retryable) == (grpc.StatusCode.UNAVAILABLE, True)
        await until(lambda: shared._stream is not None and shared._stream.takes_calls, "a second stream", TIMEOUT_S)
        assert await unread == ["served"]
    shared.close()


async def test_a_call_that_no_router_takes_is_unavailable() -> None:
    async with serving() as (router, client):
        refused = asyncio.create_task(read(client, "refused"))
        for count in (1, 2, 3):
            await router.until_started(count)
            await router.write(end(router.starts[-1].call, not_started=True, status_code=14))
        with pytest.raises(CallFailed, match="takes no call") as failed:
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
