"""Every exchange ends, and every form of an answer is read as one, whatever the other side sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.answers import MAX_NOTED, MAX_TOKENS_READ, Answer, Token, Usage, read_stream, read_whole
from conformance.findings import Outcome
from conformance.http_exchange import Call, End, Endpoint, exchange
from conformance.metrics_page import InUse, hand_offs, in_use
from conformance.token_probes import hand_off_finding

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def server(*pieces: bytes, closes: bool = True, endless: bytes = b"") -> AsyncIterator[Endpoint]:
    """Sends these pieces to whoever connects, and `endless` again and again."""
    answering: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(cast("asyncio.Task[None]", asyncio.current_task()))
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while endless:
                writer.write(endless)
                await writer.drain()
            if not closes:
                await reader.read()
        writer.close()

    started = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with started:
        yield Endpoint("127.0.0.1", started.sockets[0].getsockname()[1], tls=False)
    await asyncio.gather(*answering)


@pytest.mark.parametrize(
    ("pieces", "end", "body"),
    [
        ((HEAD, b"content-length: 3\r\n\r\nab", b"c"), End.COMPLETE, b"abc"),
        ((HEAD, b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"0\r\n\r\n"), End.COMPLETE, b"a"),
        ((HEAD, b"\r\nab"), End.COMPLETE, b"ab"),  # until the connection closes
        ((b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, b"content-length: 1\r\n\r\na"), End.COMPLETE, b"a"),
        ((HEAD, b"content-length: 3\r\n\r\nab"), End.CUT, b"ab"),
        ((HEAD, b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"), End.CUT, b"a"),
        ((), End.CUT, b""),
        ((b"220 smtp\r\n",), End.MALFORMED, b""),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), End.CUT, b""),
        ((HEAD + b"content-length: 1\r\n\r\na" + HEAD + b"content-length: 1\r\n\r\nb",), End.MALFORMED, b"a"),
        ((HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",), End.MALFORMED, b""),
        ((b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",), End.MALFORMED, b""),
    ],
)
async def test_an_answer_ends_as_it_was_sent(pieces: tuple[bytes, ...], end: End, body: bytes) -> None:
    async with server(*pieces) as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert (reply.end, bytes(reply.body)) == (end, body)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 100])
async def test_events_are_counted_however_they_are_cut(size: int) -> None:
    body = b"data: a\n\ndata:data: b\n\n"
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    async with server(HEAD, b"transfer-encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n") as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert (reply.end, reply.num_events) == (End.COMPLETE, 3)


@pytest.mark.parametrize("cut_at", range(1, 43))
async def test_a_reset_at_each_byte_is_no_answer(cut_at: int) -> None:
    async with server((HEAD + b"content-length: 5\r\n\r\nabcde")[:cut_at]) as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert reply.end is End.CUT


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (HEAD + b"a: ", b"x" * 9000),
        (HEAD, b"a: b\r\n" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        (HEAD + b"\r\n", b"x" * 9000),
        (HEAD + b"\r\n", b"data: {}\n\n" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;a=", b"x" * 9000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000),
    ],
)
async def test_what_has_no_end_is_left(begin: bytes, endless: bytes) -> None:
    async with server(begin, endless=endless) as endpoint:
        reply = await exchange(endpoint, Call("/", max_reply_bytes=100_000), 10.0)
    assert reply.end is End.TOO_LARGE
    assert len(reply.body) <= 100_000 + (1 << 16)


async def test_a_silent_server_nobody_there_and_enough_seen_are_ends_too() -> None:
    async with server(HEAD, b"content-length: 5\r\n\r\nab", closes=False) as endpoint:
        reply = await exchange(endpoint, Call("/"), 0.05)
        assert (reply.end, bytes(reply.body)) == (End.LATE, b"ab")
        reply = await exchange(endpoint, Call("/"), 10.0, lambda reply: len(reply.body) == 2)
        assert reply.end is End.LEFT
    assert (await exchange(endpoint, Call("/"), 10.0)).end is End.UNREACHABLE


async def test_a_server_without_tls_is_named() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as started:
        endpoint = Endpoint("127.0.0.1", started.sockets[0].getsockname()[1], tls=True)
        assert (await exchange(endpoint, Call("/"), 10.0)).end is End.UNTRUSTED


def test_an_address_is_read_or_refused() -> None:
    assert Endpoint.parse("https://[::1]:9/a/v1/") == Endpoint("::1", 9, tls=True, path="/a")
    assert b"\r\nhost: [::1]:9\r\n" in Call("/").encode(Endpoint.parse("https://[::1]:9"))
    assert Endpoint.parse("host").url == "http://host:80"
    of_http = (
        "http://user:secret@a",
        "http://a/?x=y",
        "http://a#x",
        "http://",
        "http://a b",
        "http://a:x",
        "http://a..b",
    )
    for wrong in (*of_http, "ftp://a", "a\r\nx: y"):
        with pytest.raises(ValueError, match=r".") as refused:
            Endpoint.parse(wrong)
        assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="printable"):
        Endpoint.parse("http://a", key="a\r\nb")


# ---- every form of an answer is read as one, and no answer of a hostile stack raises anything

TOPS = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -2.5}]
CHAT = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": TOPS}]}
TEXT = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.5}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
NAMES = ("id", "error", "choices", "delta", "message", "content", "text", "finish_reason", "logprobs", "tokens",
         "token_logprobs", "top_logprobs", "usage", "prompt_tokens", "type", "role")  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)


def events(*messages: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages)


def test_whole_and_streamed_chats_and_texts_are_read_alike() -> None:
    chat = {"role": "assistant", "content": "a"}
    end = {"finish_reason": "length"}
    whole_chat = {"id": "x", "choices": [{"message": chat, "logprobs": CHAT} | end], "usage": USAGE}
    whole_text = {"id": "x", "choices": [{"text": "a", "logprobs": TEXT} | end], "usage": USAGE}
    last = {"id": "x", "choices": [], "usage": USAGE}
    chats = events({"id": "x", "choices": [{"delta": chat, "logprobs": CHAT} | end]}, last) + b"data: [DONE]\r\n\r\n"
    texts = b": ping\n\n" + events({"id": "x", "choices": [{"text": "a", "logprobs": TEXT} | end]}, last)
    right = Answer("a", [Token("a", -0.5, 2.0)], ["length"], ["x"], 1, 0, [Usage(3, 1, 4, 2)])
    found = [read_whole(json.dumps(whole_chat).encode()), read_stream(chats)]
    assert found == [right, Answer(**(vars_of(right) | {"num_done": 1}))]
    found = [read_whole(json.dumps(whole_text).encode()), read_stream(texts)]
    assert found == [Answer(**(vars_of(right) | {"num_roles": 0}))] * 2


def vars_of(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answer.__slots__}


def test_faults_of_form_are_noted() -> None:
    assert read_stream(b"data: [DONE]\n\n" + events({})).faults == ["an event after [DONE]"]
    for no_json in (b"[" * 200_000, b'{"a": NaN}', b'{"id": "a", "id": "b"}', b"9" * 5000, b"\xff\xfe"):
        assert read_whole(no_json).faults == ["a message is no JSON, or has a name twice"]
    assert read_whole(b'{"error": "oops"}').faults == ["an error without type and message"]
    assert read_whole(b'{"error": {"type": "t", "message": "m"}}').error == "t: m"
    assert read_stream(b'data: {"choices"').text == ""  # cut off


def test_what_is_kept_of_an_answer_is_bounded() -> None:
    many = 10_000
    messages = [{"id": str(number), "choices": [{"finish_reason": "x", "logprobs": TEXT}], "usage": USAGE}
                for number in range(many)]  # fmt: skip
    answer = read_stream(events(*messages))
    assert (len(answer.tokens), len(answer.ids), len(answer.usages)) == (MAX_TOKENS_READ, MAX_NOTED, MAX_NOTED)
    assert len(answer.finish_reasons) == MAX_NOTED
    assert read_whole(b'{"usage": {"prompt_tokens": %d}}' % 2**63).usage == Usage(-1, -1, -1, None)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_answer_raises(body: bytes) -> None:
    assert read_whole(body).num_done == 0
    assert read_stream(b"data: " + body + b"\n\n").num_done <= 1
    assert in_use(body.decode(errors="replace")).requests is None


PAGE = """# HELP vllm:num_requests_running in use
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0 1700000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_by_source_total{source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 5.0
vllm:num_requests_waiting{} NaN
"""


def test_a_page_of_metrics_says_what_is_in_use_and_what_was_handed_over() -> None:
    assert in_use(PAGE) == InUse(3.0, 0.25)
    assert hand_offs(PAGE) == {"vllm:prompt_tokens_by_source_total": 5.0}
    assert hand_offs("") == {}
    assert not in_use("").known
    assert in_use(PAGE).beyond(InUse(1.0, 0.25)) == InUse(2.0, 0.0)
    assert not in_use(PAGE).beyond(InUse(3.0, None))


def test_any_counter_of_hand_offs_shows_one() -> None:
    """Tandem with vLLM inside has a counter of bytes, which stays 0, and one of requests by path."""
    page = (
        'tandem_worker_transferred_bytes_total{worker="w"} 0\ntandem_requests_total{end="x",path="disaggregated"} %d\n'
    )
    before = hand_offs(page % 2 + 'tandem_requests_total{end="x",path="local"} 7\n')
    assert hand_off_finding(before, before).outcome is Outcome.NOT_SHOWN
    shown = hand_off_finding(before, hand_offs(page % 5))
    assert (shown.outcome, shown.why) == (Outcome.HOLDS, "tandem_requests_total grew by 3")
    assert hand_off_finding({}, {}).outcome is Outcome.NOT_SHOWN
