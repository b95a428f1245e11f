"""One GenerateMany stream in the router: the events of its calls, its rules, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from core.errors import InvalidRequest, QueueFull, TandemError
from protos import inference_pb2
from router import shared_stream
from router.serving.call_messages import CallMessages
from router.serving.call_writer import CallWriter
from router.shared_stream import SharedStream
from tests.support.waiting import until

TIMEOUT_S = 20.0


def start(call: int, text: str = "go", timeout_ms: float = 0.0) -> inference_pb2.GenerateManyRequest:
    request = inference_pb2.GenerateRequest(text=text)
    return inference_pb2.GenerateManyRequest(
        start=inference_pb2.StartCall(call=call, request=request, timeout_ms=timeout_ms, metadata={"traceparent": "t"})
    )


def cancel(call: int) -> inference_pb2.GenerateManyRequest:
    return inference_pb2.GenerateManyRequest(cancel=call)


class Messages:
    """In place of `CallMessages`: gives the texts that wait, and ends with `end` or an error."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error: Exception | None = None
        self.have_ended = False

    def due(self, make: Callable[[], inference_pb2.GenerateResponse]) -> Any:
        while self.texts:
            response = make()
            response.tokens.text = self.texts.pop(0)
            response.tokens.token_ids.append(1)
            yield response
        if self.error is not None:
            raise self.error


class Client:
    """The far end: the context that the stream writes to, the requests that it reads, and the calls that it serves."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[inference_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self.messages: list[inference_pb2.GenerateManyResponse] = []
        self.reads = asyncio.Event()  # cleared: a write waits
        self.reads.set()
        self.num_writes = 0
        self.calls: dict[str, tuple[CallWriter, Messages]] = {}  # by the text of the request
        self.cancelled: list[str] = []
        self.refusals: list[TandemError] = []
        self.stream = SharedStream(cast(Any, self), self.serve, self.refusals.append, is_draining=False)

    async def write(self, message: inference_pb2.GenerateManyResponse) -> None:
        self.num_writes += 1
        await self.reads.wait()
        self.messages.append(message)

    async def serve(self, request: inference_pb2.GenerateRequest, writer: CallWriter) -> None:
        if request.text == "refused":
            raise QueueFull("the queue is full", retry_after_s=2.0)
        if request.text == "broken":
            raise RuntimeError("a bug")
        messages = Messages()
        self.calls[request.text] = writer, messages
        try:
            await writer.write_all(cast(CallMessages, messages))
        except asyncio.CancelledError:
            self.cancelled.append(request.text)
            raise

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def deliver(self, text: str, *tokens: str, ends: bool = False, error: Exception | None = None) -> None:
        writer, messages = self.calls[text]
        messages.texts += tokens
        messages.have_ended, messages.error = ends, error
        writer.changed()

    def events(self) -> list[tuple[int, str]]:
        """(call, text or status) of every event."""
        found = []
        for message in self.messages:
            for event in message.events:
                is_end = event.HasField("ended")
                found.append((event.call, f"= {event.ended.status_code}" if is_end else event.response.tokens.text))
        return found

    async def until_served(self, *texts: str) -> None:
        await until(lambda: set(texts) <= self.calls.keys(), f"{texts} are served", TIMEOUT_S)

    async def until_events(self, count: int) -> None:
        await until(lambda: len(self.events()) >= count, lambda: f"{count} events: {self.events()}", TIMEOUT_S)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Client, asyncio.Task[None]]]:
    client = Client()
    task = asyncio.create_task(client.stream.serve_all(client))
    try:
        yield client, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_message_has_the_events_of_all_calls_and_the_first_tokens_lead() -> None:
    async with serving() as (client, _):
        for number, text in enumerate(("a", "b", "c"), 1):
            client.requests.put_nowait(start(number, text))
        await client.until_served("a", "b", "c")
        client.deliver("a", "a0")
        client.deliver("b", "b0")
        await client.until_events(2)
        client.deliver("a", "a1")
        client.deliver("b", "b1", ends=True)
        client.deliver("c", "c0")
        await client.until_events(6)
        assert client.events()[:2] == [(1, "a0"), (2, "b0")]
        assert [(event.call, event.response.tokens.text) for event in client.messages[-1].events] == [
            (3, "c0"), (1, "a1"), (2, "b1"), (2, ""),
        ]  # fmt: skip
        assert client.messages[-1].events[-1].WhichOneof("event") == "ended"


async def test_tokens_that_arrive_while_the_client_does_not_read_go_into_one_message() -> None:
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "a"))
        await client.until_served("a")
        client.reads.clear()
        client.deliver("a", "0")
        await until(lambda: client.num_writes == 1, "the first write waits", TIMEOUT_S)
        for text in "1234":
            client.deliver("a", text)
        client.reads.set()
        await client.until_events(5)
        assert [len(message.events) for message in client.messages] == [1, 4]


async def test_a_call_has_its_own_metadata_and_deadline() -> None:
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "limited", timeout_ms=5_000))
        client.requests.put_nowait(start(2, "unlimited"))
        await client.until_served("limited", "unlimited")
        limited, unlimited = (client.calls[name][0] for name in ("limited", "unlimited"))
        remaining = limited.time_remaining()
        assert remaining is not None
        assert 0.0 < remaining <= 5.0
        assert unlimited.time_remaining() is None
        assert list(limited.invocation_metadata()) == [("traceparent", "t")]


async def test_an_error_ends_its_call_alone_with_status_and_hint() -> None:
    async with serving() as (client, _):
        for number, text in enumerate(("refused", "fails", "broken", "goes on"), 1):
            client.requests.put_nowait(start(number, text))
        await client.until_served("fails", "goes on")
        client.deliver("fails", "part", error=InvalidRequest("text", "is wrong"))
        client.deliver("goes on", "more", ends=True)
        await client.until_events(6)
        ends = {
            event.call: event.ended
            for message in client.messages
            for event in message.events
            if event.HasField("ended")
        }
        assert {call: ended.status_code for call, ended in ends.items()} == {1: 8, 2: 3, 3: 13, 4: 0}
        assert dict(ends[1].metadata) == {"tandem-retryable": "true", "tandem-retry-after-ms": "2000"}
        assert (ends[2].message, ends[2].metadata["tandem-field"]) == ("text: is wrong", "text")
        assert ends[3].message == "RuntimeError: a bug"
        assert (2, "part") in client.events(), "what came before the error"


async def test_a_cancelled_call_ends_without_an_event() -> None:
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "a"))
        client.requests.put_nowait(start(2, "b"))
        await client.until_served("a", "b")
        client.requests.put_nowait(cancel(1))
        client.requests.put_nowait(cancel(7))  # has ended, or never was
        await until(lambda: client.cancelled == ["a"], "the call is cancelled", TIMEOUT_S)
        client.deliver("a", "late")
        client.deliver("b", "b0", ends=True)
        await client.until_events(2)
        assert client.events() == [(2, "b0"), (2, "= 0")]


async def test_a_client_that_closes_its_side_gets_the_rest_and_then_the_stream_ends() -> None:
    async with serving() as (client, task):
        client.requests.put_nowait(start(1, "a"))
        client.requests.put_nowait(None)
        await client.until_served("a")
        client.deliver("a", "a0")
        await client.until_events(1)
        assert not task.done()
        client.deliver("a", "a1", ends=True)
        async with asyncio.timeout(TIMEOUT_S):
            await task
        assert client.events() == [(1, "a0"), (1, "a1"), (1, "= 0")]


async def test_a_draining_router_refuses_new_calls_as_not_started_and_ends_with_the_last_open_one() -> None:
    async with serving() as (client, task):
        client.requests.put_nowait(start(1, "a"))
        await client.until_served("a")
        client.stream.drain()
        client.requests.put_nowait(start(2, "late"))
        await client.until_events(1)
        (message,) = client.messages
        assert message.events[0].ended.not_started
        assert message.events[0].ended.metadata["tandem-retryable"] == "true"
        client.deliver("a", "a0", ends=True)
        async with asyncio.timeout(TIMEOUT_S):
            await task
        assert client.events()[1:] == [(1, "a0"), (1, "= 0")]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (start(1, "again"), "start.call"),
        (start(2, "late", timeout_ms=-1.0), "start.timeout_ms"),
        (start(2, "late", timeout_ms=float("nan")), "start.timeout_ms"),
        (inference_pb2.GenerateManyRequest(), "action"),
    ],
)
async def test_a_message_that_breaks_the_rules_ends_every_call(
    message: inference_pb2.GenerateManyRequest, field: str
) -> None:
    async with serving() as (client, task):
        client.requests.put_nowait(start(1, "a"))
        await client.until_served("a")
        client.requests.put_nowait(message)
        with pytest.raises(InvalidRequest) as refused:
            async with asyncio.timeout(TIMEOUT_S):
                await task
        assert refused.value.field == field
        assert client.cancelled == ["a"]


async def test_calls_beyond_the_limit_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MAX_OPEN_CALLS", 2)
    async with serving() as (client, _):
        for number, text in enumerate("abc", 1):
            client.requests.put_nowait(start(number, text))
        await client.until_served("a", "b")
        await client.until_events(1)
        (message,) = client.messages
        assert (message.events[0].call, message.events[0].ended.status_code) == (3, 8)
        assert not message.events[0].ended.not_started
        assert len(client.refusals) == 1


async def test_nothing_is_read_from_a_client_that_does_not_read_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MAX_ENDED_CALLS", 3)
    async with serving() as (client, _):
        client.reads.clear()
        for number in range(1, 21):
            client.requests.put_nowait(start(number, "refused"))
            await asyncio.sleep(0.005)
        left = client.requests.qsize()
        assert left >= 10, "most of the requests wait in the connection"
        client.reads.set()
        await client.until_events(20)
        assert client.requests.empty()


async def test_a_message_stops_growing_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MESSAGE_BYTES", 1_500)
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "a"))
        client.requests.put_nowait(start(2, "b"))
        await client.until_served("a", "b")
        client.reads.clear()
        client.deliver("a", "first")
        await until(lambda: client.num_writes == 1, "the first write waits", TIMEOUT_S)
        client.deliver("a", *("x" * 500 for _ in range(8)), ends=True)
        client.deliver("b", "b0", ends=True)
        client.reads.set()
        await client.until_events(12)
        assert [text for call, text in client.events() if call == 1] == ["first", *("x" * 500 for _ in range(8)), "= 0"]
        assert [text for call, text in client.events() if call == 2] == ["b0", "= 0"]
        assert max(message.ByteSize() for message in client.messages) < 2_200
        assert client.events().index((2, "b0")) < 6, "a long call holds up the others"


async def test_ended_calls_with_long_errors_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MESSAGE_BYTES", 200)
    async with serving() as (client, _):
        client.reads.clear()
        for number in range(1, 31):
            client.requests.put_nowait(start(number, "refused"))
        await until(lambda: client.requests.empty() and len(client.stream._ended) > 20, "they wait", TIMEOUT_S)
        client.reads.set()
        await client.until_events(30)
        assert max(message.ByteSize() for message in client.messages) < 400


async def test_a_call_that_is_cancelled_before_it_runs_leaves_nothing() -> None:
    client = Client()

    async def at_once() -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        yield start(1, "a")
        yield cancel(1)

    async with asyncio.timeout(TIMEOUT_S):
        await client.stream.serve_all(at_once())
    assert client.events() == []


async def test_an_error_text_that_is_no_text_still_ends_its_call() -> None:
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "a"))
        await client.until_served("a")
        client.deliver("a", error=InvalidRequest("text", "\udc80"))
        await client.until_events(1)
        assert client.events() == [(1, "= 3")]


async def test_an_endless_timeout_is_none() -> None:
    async with serving() as (client, _):
        client.requests.put_nowait(start(1, "a", timeout_ms=float("inf")))
        await client.until_served("a")
        remaining = client.calls["a"][0].time_remaining()
        assert remaining is not None
        assert 1e6 < remaining < 1e8
