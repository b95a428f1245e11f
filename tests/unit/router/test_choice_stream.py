"""A choice gives the client the same tokens, text and log-probabilities, however messages join the tokens, and its
writer gives each token once, in order, however slow the reader is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import RequestCancelled
from core.lifecycle import Stage, Timeline
from core.request import Request, SamplingParams
from core.step import SampledToken
from router.requests.events import Deliver, Fail
from router.serving.call_writer import TURN_ITEMS, SinkWriter, StreamWriter
from router.serving.choice_calls import ChoiceCalls
from router.serving.choice_stream import CALL_ITEMS, MAX_CHUNK_ITEMS, ChoiceStream, Chunk
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import inference_pb2
from tests.support.waiting import until
from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tool_formats import FORMATS

PIECES = [b"a", b"b", "é".encode()[:1], "é".encode()[1:], b"END", b"E", b"ND", b""]  # the texts of token ids 0 to 7
OVER = Fail("r", RequestCancelled("over"), Timeline(Stage.TOKENIZE, 0.0))


def choice(*stop_strings: str, changed: Callable[[], None] = lambda: None, number: int = 0) -> ChoiceStream:
    request = Request("r", (1,), 1, SamplingParams(max_tokens=100_000))
    text = TextStream(IncrementalDetokenizer(PIECES.__getitem__), StopStrings(stop_strings))
    return ChoiceStream(number, "model", "chat", request, "r", 0.0, text, cast(Any, None), changed, PIECES.__getitem__)


def take(stream: ChoiceStream) -> inference_pb2.TokenChunk:
    """The next chunk, as the message of the gRPC API."""
    message = inference_pb2.TokenChunk()
    stream.take_chunk().fill(message)
    return message


def deliver(stream: ChoiceStream, *token_ids: int) -> bool:
    return stream.deliver(Deliver("r", len(stream.token_ids), token_ids, ()))


def test_the_writer_is_woken_once_for_the_tokens_of_one_chunk() -> None:
    changed = Mock()
    stream = choice(changed=changed)
    for _ in range(2):
        deliver(stream, 0)
        deliver(stream, 1)
        assert changed.call_count == 1
        take(stream)
        changed.reset_mock()


def test_a_stop_string_is_found_when_its_tokens_arrive_and_nothing_follows() -> None:
    stream = choice("END")
    assert not deliver(stream, 0, 5)
    assert deliver(stream, 6, 1, 1), "its text is complete before anybody takes a chunk"
    assert not deliver(stream, 0), "told once"
    chunk = take(stream)
    assert (list(chunk.token_ids), chunk.text) == ([0, 5, 6], "a")
    assert stream.last_chunk() is None
    assert not stream.has_chunk


def test_each_chunk_has_the_text_of_its_own_tokens_when_many_tokens_wait() -> None:
    """A client may go on at another router behind any chunk, and gets the text behind its tokens there."""
    stream = choice("END")
    deliver(stream, *[0] * (MAX_CHUNK_ITEMS + 2))
    deliver(stream, *[1] * MAX_CHUNK_ITEMS)
    chunks = []
    while stream.has_chunk:
        chunks.append(take(stream))
    assert [len(chunk.token_ids) for chunk in chunks] == [MAX_CHUNK_ITEMS, 2, MAX_CHUNK_ITEMS]
    for chunk in chunks:
        assert chunk.text == "".join("ab"[token_id] for token_id in chunk.token_ids)


def test_little_of_an_output_is_parsed_for_calls_at_a_time() -> None:
    """Its text is a client's choice: tokens of 128 characters, a hundred of which take a third of a turn's time."""
    stream = choice()
    stream.calls = ChoiceCalls(FORMATS["mistral"], stream.request, "r")
    deliver(stream, *[0] * MAX_CHUNK_ITEMS)
    chunk = stream.take_chunk()
    assert len(chunk.token_ids) == MAX_CHUNK_ITEMS // (1 + CALL_ITEMS)
    assert TURN_ITEMS < chunk.num_items <= MAX_CHUNK_ITEMS


def test_each_log_probability_has_the_bytes_of_its_token() -> None:
    stream = choice()
    stream.deliver(Deliver("r", 0, (2, 4), (SampledToken(2, -0.5, ((3, -0.25),)), SampledToken(4, -1.0))))
    entries = take(stream).logprobs
    assert [entry.token for entry in entries] == [PIECES[2], b"END"]
    assert [entry.token for entry in entries[0].top] == [PIECES[3]]


async def test_between_two_chunks_lies_the_interval_unless_the_choice_ends() -> None:
    changed = asyncio.Event()
    stream = choice(changed=changed.set)
    deliver(stream, 0)
    assert stream.is_due, "the first token does not wait"
    stream.pause(0.01)
    take(stream)
    changed.clear()
    deliver(stream, 1)
    assert not stream.is_due
    assert not changed.is_set(), "the writer sleeps"
    await asyncio.wait_for(changed.wait(), 5)
    assert stream.is_due
    stream.pause(60.0)
    changed.clear()
    assert not stream.is_due
    stream.end(OVER)
    assert stream.is_due
    assert changed.is_set()
    stream.end_pause()


TOKEN_IDS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=4)
RUNS = st.lists(st.tuples(TOKEN_IDS, st.booleans()), max_size=12)  # (token ids, a message follows)


@given(RUNS, st.lists(st.sampled_from(["END", "ab", "é", "bE", "N"]), max_size=3))
def test_the_answer_does_not_depend_on_the_messages(runs: list[tuple[list[int], bool]], stops: list[str]) -> None:
    def answer(steps: list[tuple[list[int], bool]]) -> tuple[list[int], list[int], str, str]:
        stream, index, chunks = choice(*stops), 0, []
        for token_ids, takes in steps:
            logprobs = tuple(SampledToken(token_id, -1.0 - token_id) for token_id in token_ids)
            stream.deliver(Deliver("r", index, tuple(token_ids), logprobs))
            index += len(token_ids)
            if takes and stream.has_chunk:
                chunks.append(take(stream))
        if stream.has_chunk:
            chunks.append(take(stream))
        last = stream.last_chunk()
        rest = last.text if last is not None else ""
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        of_logprobs = [int(-1.0 - entry.logprob) for chunk in chunks for entry in chunk.logprobs]
        return ids, of_logprobs, "".join(chunk.text for chunk in chunks) + rest, stream.text.stop_match

    all_ids = [token_id for token_ids, _ in runs for token_id in token_ids]
    one_by_one = answer([([token_id], True) for token_id in all_ids])
    assert answer(runs) == one_by_one
    assert answer([(all_ids, False)] if all_ids else []) == one_by_one
    assert one_by_one[0] == one_by_one[1]


# ---- writers


def call_of(writer: StreamWriter | SinkWriter, num_choices: int = 1) -> tuple[list[ChoiceStream], asyncio.Task[None]]:
    """The choices of a call, and the task that writes them."""
    streams = [choice(changed=writer.changed, number=number) for number in range(num_choices)]
    writer.begin(streams, 0.0, lambda: 0.0)
    return streams, asyncio.create_task(writer.write_all())


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
    (stream,), writing = call_of(StreamWriter(cast(Any, context)))
    deliver(stream, *[0] * MAX_CHUNK_ITEMS, 1)
    await asyncio.sleep(0)
    deliver(stream, *[0] * MAX_CHUNK_ITEMS)  # while the first of two messages is written
    for _ in range(3):
        context.may_read.release()
    await until(lambda: len(context.written) == 3, "all is written")
    sent = [token_id for message in context.written for token_id in message.tokens.token_ids]
    assert sent == stream.token_ids
    stream.end(OVER)
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
    streams, writing = call_of(SinkWriter(sink, LocalContext(())), num_choices=2)
    await asyncio.sleep(0)
    for stream in streams:
        deliver(stream, 0, 1)
    assert sink.chunks == []
    await asyncio.sleep(0)
    assert [(chunk.choice, chunk.text) for chunk in sink.chunks] == [(0, "ab"), (1, "ab")]
    streams[0].end(OVER)
    with pytest.raises(RequestCancelled):
        await writing


async def test_a_full_sink_gets_nothing_and_then_all_that_came_as_one_chunk() -> None:
    sink = Collected()
    (stream,), writing = call_of(SinkWriter(sink, LocalContext(())))
    sink.is_full = True
    for token_id in (0, 1, 0):
        deliver(stream, token_id)
        await asyncio.sleep(0)
    assert sink.chunks == []
    sink.make_room()
    assert [(chunk.index, chunk.text) for chunk in sink.chunks] == [(0, "aba")]
    deliver(stream, 0)
    await asyncio.sleep(0)
    assert [chunk.text for chunk in sink.chunks] == ["aba", "a"]
    writing.cancel()
    sink.make_room()
    deliver(stream, 1)
    await asyncio.sleep(0)
    assert len(sink.chunks) == 2, "a cancelled call writes nothing more"


async def test_a_client_that_was_behind_gets_its_tokens_in_many_turns_of_the_loop() -> None:
    """Sixteen choices with log-probabilities took four seconds of one turn."""
    sink = Collected()
    streams, writing = call_of(SinkWriter(sink, LocalContext(())), num_choices=3)
    sink.is_full = True
    for stream in streams:
        deliver(stream, *[0] * (2 * MAX_CHUNK_ITEMS + 1))
    await asyncio.sleep(0)
    sink.make_room()
    num_turns = num_before = 0
    while len(sink.chunks) > num_before:
        in_turn = sink.chunks[num_before:]
        assert sum(len(chunk.token_ids) for chunk in in_turn) <= TURN_ITEMS + MAX_CHUNK_ITEMS
        num_turns, num_before = num_turns + 1, len(sink.chunks)
        if num_turns == 4:  # choice 0 has been given, choice 2 has not
            deliver(streams[0], 1)
            deliver(streams[2], 1)
        await asyncio.sleep(0)
    for number, stream in enumerate(streams):
        given = [token_id for chunk in sink.chunks if chunk.choice == number for token_id in chunk.token_ids]
        assert given == stream.token_ids
    deliver(streams[1], 0)
    streams[1].end(OVER)
    with pytest.raises(RequestCancelled):
        await writing
    assert sum(len(chunk.token_ids) for chunk in sink.chunks) == sum(len(stream.token_ids) for stream in streams)


async def test_an_error_of_a_sink_ends_the_call() -> None:
    class Broken(Collected):
        def chunk(self, chunk: Chunk) -> None:
            raise OSError(f"no place for {chunk.text}")

    (stream,), writing = call_of(SinkWriter(Broken(), LocalContext(())))
    await asyncio.sleep(0)
    deliver(stream, 0)
    with pytest.raises(OSError, match="no place for a"):
        await writing
