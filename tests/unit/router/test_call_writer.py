"""The two writers of a call: each token goes out once, in order, however slow the reader is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from core.errors import RequestCancelled
from core.lifecycle import Stage, Timeline
from core.request import Request, SamplingParams
from router.requests.events import Deliver, Fail
from router.serving.call_messages import CallMessages
from router.serving.call_writer import SinkWriter, StreamWriter
from router.serving.choice_stream import MAX_CHUNK_ITEMS, ChoiceStream, Chunk
from tandem_client.stubs import inference_pb2
from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream

PIECES = [b"a", b"b", b"c"]


def call_of(writer: StreamWriter | SinkWriter, num_choices: int = 1) -> tuple[list[ChoiceStream], CallMessages]:
    request = Request("r", (1,), 1, SamplingParams(max_tokens=100_000))
    streams = [
        ChoiceStream(
            choice, "model", "chat", request, "r", 0.0,
            TextStream(IncrementalDetokenizer(PIECES.__getitem__), StopStrings(())),
            cast(Any, None), writer.changed, PIECES.__getitem__,
        )
        for choice in range(num_choices)
    ]  # fmt: skip
    return streams, CallMessages(streams, 0.0, lambda: 0.0)


def deliver(stream: ChoiceStream, *token_ids: int) -> None:
    stream.deliver(Deliver("r", len(stream.token_ids), token_ids, ()))


def end(stream: ChoiceStream) -> None:
    stream.end(Fail("r", RequestCancelled("over"), Timeline(Stage.TOKENIZE, 0.0)))


class SlowContext:
    """A gRPC context whose client reads a message each time `may_read` is released."""

    def __init__(self) -> None:
        self.may_read = asyncio.Semaphore(0)
        self.written: list[inference_pb2.GenerateResponse] = []

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        await self.may_read.acquire()
        self.written.append(message)


async def test_tokens_that_come_while_a_long_message_is_written_do_not_wait_for_the_end() -> None:
    context = SlowContext()
    writer = StreamWriter(cast(Any, context))
    (stream,), messages = call_of(writer)
    writing = asyncio.create_task(writer.write_all(messages))
    deliver(stream, *[0] * MAX_CHUNK_ITEMS, 1)
    await asyncio.sleep(0)
    deliver(stream, *[2] * MAX_CHUNK_ITEMS)  # while the first of two messages is written
    for _ in range(3):
        context.may_read.release()
    async with asyncio.timeout(5):
        while len(context.written) < 3:
            await asyncio.sleep(0)
    sent = [token_id for message in context.written for token_id in message.tokens.token_ids]
    assert sent == stream.token_ids
    end(stream)
    with pytest.raises(RequestCancelled):
        await writing


class Collected:
    """A sink that may be full."""

    def __init__(self) -> None:
        self.is_full = False
        self.chunks: list[Chunk] = []
        self._callbacks: list[Callable[[], None]] = []

    def when_room(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def make_room(self) -> None:
        self.is_full = False
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def finished(self, finished: inference_pb2.Finished) -> None:
        raise AssertionError(f"no choice of these tests finishes: {finished}")


async def test_a_sink_gets_tokens_after_the_event_that_brought_them() -> None:
    sink = Collected()
    writer = SinkWriter(sink, (), 1.0)
    streams, messages = call_of(writer, num_choices=2)
    writing = asyncio.create_task(writer.write_all(messages))
    await asyncio.sleep(0)
    for stream in streams:
        deliver(stream, 0, 1)
    assert sink.chunks == []
    await asyncio.sleep(0)
    assert [(chunk.choice, chunk.text) for chunk in sink.chunks] == [(0, "ab"), (1, "ab")]
    end(streams[0])
    with pytest.raises(RequestCancelled):
        await writing


async def test_a_full_sink_gets_nothing_and_then_all_that_came_as_one_chunk() -> None:
    sink = Collected()
    writer = SinkWriter(sink, (), 1.0)
    (stream,), messages = call_of(writer)
    writing = asyncio.create_task(writer.write_all(messages))
    sink.is_full = True
    for token_id in (0, 1, 2):
        deliver(stream, token_id)
        await asyncio.sleep(0)
    assert sink.chunks == []
    sink.make_room()
    assert [(chunk.index, chunk.text) for chunk in sink.chunks] == [(0, "abc")]
    deliver(stream, 0)
    await asyncio.sleep(0)
    assert [chunk.text for chunk in sink.chunks] == ["abc", "a"]
    writing.cancel()
    sink.make_room()
    deliver(stream, 1)
    await asyncio.sleep(0)
    assert len(sink.chunks) == 2, "a cancelled call writes nothing more"


async def test_an_error_of_a_sink_ends_the_call() -> None:
    class Broken(Collected):
        def chunk(self, chunk: Chunk) -> None:
            raise OSError(f"no place for {chunk.text}")

    writer = SinkWriter(Broken(), (), 1.0)
    (stream,), messages = call_of(writer)
    writing = asyncio.create_task(writer.write_all(messages))
    await asyncio.sleep(0)
    deliver(stream, 0)
    with pytest.raises(OSError, match="no place for a"):
        await writing
