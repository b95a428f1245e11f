"""A choice gives the client the same tokens, text and log-probabilities, however messages join the tokens."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from core.errors import RequestCancelled
from core.lifecycle import Stage, Timeline
from core.request import Request, SamplingParams
from core.step import SampledToken
from router.requests.events import Deliver, Fail
from router.serving.choice_stream import MAX_CHUNK_ITEMS, ChoiceStream
from tandem_client.stubs import inference_pb2
from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream

PIECES = [b"a", b"b", "é".encode()[:1], "é".encode()[1:], b"END", b"E", b"ND", b""]  # the texts of token ids 0 to 7


def choice(*stop_strings: str, changed: asyncio.Event | None = None) -> ChoiceStream:
    request = Request("r", (1,), 1, SamplingParams(max_tokens=100_000))
    text = TextStream(IncrementalDetokenizer(PIECES.__getitem__), StopStrings(stop_strings))
    return ChoiceStream(
        0, "model", "chat", request, "r", 0.0, text, cast(Any, None), (changed or asyncio.Event()).set,
        PIECES.__getitem__,
    )  # fmt: skip


def take(stream: ChoiceStream) -> inference_pb2.TokenChunk:
    """The next chunk, as the message of the gRPC API."""
    message = inference_pb2.TokenChunk()
    stream.take_chunk().fill(message)
    return message


def deliver(stream: ChoiceStream, first_index: int, *token_ids: int) -> bool:
    return stream.deliver(Deliver("r", first_index, token_ids, ()))


def test_the_writer_is_woken_once_for_the_tokens_of_one_chunk() -> None:
    changed = asyncio.Event()
    stream = choice(changed=changed)
    deliver(stream, 0, 0)
    assert changed.is_set()
    changed.clear()
    deliver(stream, 1, 1)
    assert not changed.is_set()
    take(stream)
    deliver(stream, 2, 1)
    assert changed.is_set()


def test_a_stop_string_is_found_when_its_tokens_arrive_and_nothing_follows() -> None:
    stream = choice("END")
    assert not deliver(stream, 0, 0, 5)
    assert deliver(stream, 2, 6, 1, 1), "its text is complete before anybody takes a chunk"
    assert not deliver(stream, 5, 0), "told once"
    chunk = take(stream)
    assert (list(chunk.token_ids), chunk.text) == ([0, 5, 6], "a")
    assert stream.last_chunk() is None
    assert not stream.has_chunk


def test_each_chunk_has_the_text_of_its_own_tokens_when_many_tokens_wait() -> None:
    """A client may go on at another router behind any chunk, and gets the text behind its tokens there."""
    stream = choice("END")
    deliver(stream, 0, *[0] * (MAX_CHUNK_ITEMS + 2))
    deliver(stream, MAX_CHUNK_ITEMS + 2, *[1] * MAX_CHUNK_ITEMS)
    chunks = []
    while stream.has_chunk:
        chunks.append(take(stream))
    assert [len(chunk.token_ids) for chunk in chunks] == [MAX_CHUNK_ITEMS, 2, MAX_CHUNK_ITEMS]
    for chunk in chunks:
        assert chunk.text == "".join("ab"[token_id] for token_id in chunk.token_ids)


def test_each_log_probability_has_the_bytes_of_its_token() -> None:
    stream = choice()
    stream.deliver(Deliver("r", 0, (2, 4), (SampledToken(2, -0.5, ((3, -0.25),)), SampledToken(4, -1.0))))
    entries = take(stream).logprobs
    assert [entry.token for entry in entries] == [PIECES[2], b"END"]
    assert [entry.token for entry in entries[0].top] == [PIECES[3]]


async def test_between_two_chunks_lies_the_interval_unless_the_choice_ends() -> None:
    changed = asyncio.Event()
    stream = choice(changed=changed)
    deliver(stream, 0, 0)
    assert stream.is_due, "the first token does not wait"
    stream.pause(60.0)
    take(stream)
    changed.clear()
    deliver(stream, 1, 1)
    assert not stream.is_due
    assert not changed.is_set(), "the writer sleeps"
    stream.end(Fail("r", RequestCancelled("cancelled"), Timeline(Stage.TOKENIZE, 0.0)))
    assert stream.is_due
    assert changed.is_set()
    stream.end_pause()


async def test_after_the_interval_the_writer_is_woken() -> None:
    changed = asyncio.Event()
    stream = choice(changed=changed)
    deliver(stream, 0, 0)
    stream.pause(0.001)
    take(stream)
    changed.clear()
    deliver(stream, 1, 1)
    async with asyncio.timeout(5):
        await changed.wait()
    assert stream.is_due


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
        if last is not None:
            chunks.append(inference_pb2.TokenChunk())
            last.fill(chunks[-1])
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        of_logprobs = [int(-1.0 - entry.logprob) for chunk in chunks for entry in chunk.logprobs]
        return ids, of_logprobs, "".join(chunk.text for chunk in chunks), stream.text.stop_match

    all_ids = [token_id for token_ids, _ in runs for token_id in token_ids]
    one_by_one = answer([([token_id], True) for token_id in all_ids])
    assert answer(runs) == one_by_one
    assert answer([(all_ids, False)] if all_ids else []) == one_by_one
    assert one_by_one[0] == one_by_one[1]
