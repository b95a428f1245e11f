"""A call ends with its answer or with one `CallFailed` that says what to do.

`Client` makes the calls of `AsyncClient` in the thread of its caller, without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from opentelemetry import trace

from core.errors import InvalidRequest, QueueFull
from tandem_client import (
    NO_RETRY,
    AsyncClient,
    CallFailed,
    Client,
    Credentials,
    Piece,
    Promise,
    Receipt,
    RetryPolicy,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    credentials,
)
from tandem_client.credentials import LOOKAHEAD_BYTES
from tandem_client.prompts import build_request
from tandem_client.results import Collector
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import TokenChunk
from tandem_client.stubs.inference_pb2 import ToolCallDelta as Delta
from tandem_client.tracing import with_trace
from tests.support.scripted_router import LOST, Failure, ScriptedRouter, scripted_router

ROOT = Path(__file__).parents[3]
NOBODY = "127.0.0.1:9"
REQUEST = inference_pb2.GenerateRequest(text="hello")


T = TypeVar("T")


@pytest_asyncio.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router(["a", "bc"]) as router:
        yield router


async def ask(address: str) -> str:
    async with AsyncClient(address, retry=NO_RETRY) as client:
        return (await client.complete("hello", timeout_s=10.0)).text


async def test_leaving_a_stream_early_cancels_the_request(router: ScriptedRouter) -> None:
    router.hold = asyncio.Event()
    async with AsyncClient(router.address) as client, asyncio.timeout(10.0):
        async with client.stream("hello") as stream:
            assert (await anext(stream)).text == "a"
        while not router.num_cancelled:
            await asyncio.sleep(0.01)


async def test_what_a_reader_has_not_taken_stays_in_the_router() -> None:
    """Otherwise a gateway with 100 clients that read nothing held 400 MiB."""
    num_bytes = 8192
    async with (
        scripted_router(["x" * num_bytes] * 2000) as router,
        AsyncClient(router.address) as client,
        contextlib.aclosing(client.stream("a")) as stream,
    ):
        for _ in range(200):  # by the speed of its reader, gRPC finds how much may be sent ahead
            await anext(stream)
        num_written = -1
        while router.num_chunks > num_written:
            num_written = router.num_chunks
            await asyncio.sleep(0.2)
        assert (num_written - 200) * num_bytes < 4 * LOOKAHEAD_BYTES


@pytest.mark.parametrize(
    ("failures", "late_failures", "says", "field", "retry_after_s"),
    [
        ([InvalidRequest("text", "is empty")], [], "INVALID_ARGUMENT text: is empty", "text", None),
        ([QueueFull("the queue is full", retry_after_s=2.5)], [], "RESOURCE_EXHAUSTED the queue is full", "", 2.5),
        ([], [LOST], "UNAVAILABLE .* went away in the middle of the answer; send the request again", "", None),
    ],
)
async def test_a_failure_names_the_field_or_says_when_to_come_back(
    failures: list[Failure], late_failures: list[Failure], says: str, field: str, retry_after_s: float | None,
    router: ScriptedRouter,
) -> None:  # fmt: skip
    router.failures, router.late_failures = failures, late_failures
    with pytest.raises(CallFailed) as failed:
        await ask(router.address)
    assert re.search(says, f"{failed.value.code.name} {failed.value}")
    assert (failed.value.field, failed.value.retryable) == (field, not field)
    assert failed.value.retry_after_s == retry_after_s


async def test_only_a_client_that_wants_a_proxy_uses_one(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not asked.done():
            asked.set_result(line)
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    assert await ask(router.address) == "abc"
    assert not asked.done()
    async with AsyncClient(router.address, Credentials(through_proxy=True), NO_RETRY) as client:
        with pytest.raises(CallFailed):
            await client.complete("hello", timeout_s=10.0)
    assert await asked == f"CONNECT {router.address} HTTP/1.1\r\n".encode()
    proxy.close()


async def test_an_address_where_nobody_listens_says_how_to_start_a_router() -> None:
    with pytest.raises(CallFailed, match=f"no router at {NOBODY}; start one with `tandem serve`"):
        await ask(NOBODY)


@pytest.mark.parametrize("target", ["ipv4:{nobody},{router}", "ipv4:{router},{nobody}", "dns:///{router}"])
async def test_an_address_that_lists_several_routers_reaches_the_one_that_serves(
    target: str, router: ScriptedRouter
) -> None:
    assert await ask(target.format(nobody=NOBODY, router=router.address)) == "abc"


async def test_a_router_that_answers_no_connection_holds_up_a_call_for_a_fourth_of_grpcs_time(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopped process, whose kernel takes connections."""
    options = dict(credentials.CHANNEL_OPTIONS)
    assert options["grpc.min_reconnect_backoff_ms"] <= 5000
    options["grpc.min_reconnect_backoff_ms"] = 500
    monkeypatch.setattr(credentials, "CHANNEL_OPTIONS", tuple(options.items()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient([f"127.0.0.1:{silent.getsockname()[1]}", router.address]) as client:
            begun_at = time.monotonic()
            assert (await client.complete("a")).text == "abc"
            assert 0.4 < time.monotonic() - begun_at < 5


def test_a_router_on_every_address_is_reached_also_without_ipv6() -> None:
    assert AsyncClient(["[::]:50051", "[::1]:50051"]).address == "127.0.0.1:50051, [::1]:50051"


@pytest.mark.parametrize("address", ["", "foo", "foo:", ":50051", "host:port"])
def test_an_address_without_host_or_port_is_refused_as_such(address: str) -> None:
    with pytest.raises(CallFailed, match=r"^router: must be host:port, with a port in \[1, 65535\], is "):
        AsyncClient(address)


async def test_the_key_of_the_credentials_goes_with_every_call_that_has_no_key_of_its_own(
    router: ScriptedRouter,
) -> None:
    credentials = Credentials(token="the-token-of-the-cluster", api_key="tk-1")
    async with AsyncClient(router.address, credentials) as client:
        await client.complete("hello")
        await client.complete("hello", metadata=[("authorization", "Bearer tk-2"), ("x-name", "value")])
    assert [headers["authorization"] for headers in router.metadata] == ["Bearer tk-1", "Bearer tk-2"]
    assert router.metadata[1]["x-name"] == "value"
    assert all("tandem-cluster-token" not in headers for headers in router.metadata)
    assert "tk-1" not in repr(credentials)


# ---- the blocking client


async def in_a_thread(router: ScriptedRouter, use: Callable[[Client], T], retry: RetryPolicy = NO_RETRY) -> T:
    def run() -> T:
        with Client(router.address, retry=retry) as client:
            return use(client)

    async with asyncio.timeout(20.0):
        return await asyncio.to_thread(run)


def test_both_clients_have_the_same_calls() -> None:
    calls = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert calls == {name for name in vars(Client) if not name.startswith("_")} - {"close"}


async def test_calls_answer_and_streams_end_with_a_result(router: ScriptedRouter) -> None:
    def use(client: Client) -> tuple[str, list[Piece], str, int]:
        stream = client.stream("hello")
        pieces = list(stream)
        return client.model().name, pieces, stream.result.text, len(list(client.generate(REQUEST, timeout_s=10.0)))

    name, pieces, text, num_messages = await in_a_thread(router, use)
    assert (name, [piece.text for piece in pieces], text, num_messages) == ("scripted", ["a", "bc"], "abc", 3)


async def test_a_retry_waits_for_its_pause(router: ScriptedRouter) -> None:
    router.failures = [QueueFull("full", retry_after_s=0.2)]
    started_at = asyncio.get_running_loop().time()
    assert (await in_a_thread(router, lambda client: client.complete("hello"), RetryPolicy())).text == "abc"
    assert asyncio.get_running_loop().time() - started_at >= 0.2


def closed(client: Client) -> None:
    with client.stream("hello") as stream:
        assert next(stream).text == "a"


def dropped(client: Client) -> None:
    assert next(client.stream("hello")).text == "a"


def closed_messages(client: Client) -> None:
    responses = client.generate(REQUEST, timeout_s=60.0)
    assert next(responses).tokens.text == "a"
    responses.close()


@pytest.mark.parametrize("leave", [closed, dropped, closed_messages])
async def test_leaving_a_stream_of_the_blocking_client_early_cancels_the_request(
    leave: Callable[[Client], None], router: ScriptedRouter
) -> None:
    router.hold = asyncio.Event()

    def use(client: Client) -> None:
        leave(client)
        asyncio.run_coroutine_threadsafe(cancelled(), loop).result(10.0)  # before the client closes

    async def cancelled() -> None:
        while not router.num_cancelled:
            await asyncio.sleep(0.01)

    loop = asyncio.get_running_loop()
    await in_a_thread(router, use)


async def test_the_deadline_and_ctrl_c_end_a_call_that_waits(router: ScriptedRouter) -> None:
    router.hold = asyncio.Event()
    program = f"""
import os, signal, sys, threading
from tandem_client import CallFailed, Client
from tandem_client.blocking import BlockingCall

main = threading.get_ident()
WAITING = {{threading.Condition.wait.__code__, BlockingCall.__anext__.__code__}}

def stack():
    frame = sys._current_frames()[main]
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back

def interrupt_the_wait():
    while not WAITING <= set(stack()):
        pass
    os.kill(os.getpid(), signal.SIGINT)

with Client({router.address!r}) as client:
    try:
        client.complete("hello", timeout_s=0.3)
    except CallFailed as error:
        print(error.code.name)
    stream = client.stream("hello")
    next(stream), next(stream)
    try:
        threading.Thread(target=interrupt_the_wait).start()
        next(stream)
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["DEADLINE_EXCEEDED", "interrupted"], "")


# ---- Requests from keyword arguments, and typed results from messages.

LOGPROB = inference_pb2.TokenLogprobs(
    logprob=-0.5, token=b"\xc3", top=[inference_pb2.Logprob(token_id=2, logprob=-0.25, token=b"b")]
)
CHUNKS = [
    inference_pb2.TokenChunk(text="a", token_ids=[1], logprobs=[LOGPROB]),
    inference_pb2.TokenChunk(text="bc", token_ids=[2, 3], logprobs=[LOGPROB, LOGPROB]),
]
FINISHED = inference_pb2.Finished(
    finish_reason=inference_pb2.FINISH_REASON_LENGTH,
    usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
    timings=inference_pb2.PhaseTimings(first_token_ms=12.5, total_ms=20.0),
    path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
    promise=inference_pb2.Promise(ttft_ms=10.0, tpot_ms=2.0, path=inference_pb2.REQUEST_PATH_LOCAL),
    receipt=inference_pb2.Receipt(
        queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, kv_block_seconds=4.0, transferred_bytes=5
    ),
    request_id="r-1",
    attempts=1,
    seed=9,
)


def test_messages_become_pieces_and_at_the_end_a_completion() -> None:
    collector = Collector()
    pieces = [collector.take(inference_pb2.GenerateResponse(tokens=chunk)) for chunk in CHUNKS]
    logprob = TokenLogprob(1, b"\xc3", -0.5, (TopLogprob(2, b"b", -0.25),))
    assert pieces[0] == Piece("a", (1,), (logprob,))
    assert collector.take(inference_pb2.GenerateResponse(finished=FINISHED)) is None
    result: Any = collector.completion
    assert (result.text, result.token_ids, len(result.logprobs)) == ("abc", (1, 2, 3), 3)
    assert (result.finish_reason, result.path, result.request_id, result.seed) == ("length", "disaggregated", "r-1", 9)
    assert result.usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    assert result.timings == Timings(0, 0, 0, 0, 12.5, 0, 0, 0, 20.0)
    assert result.promise == Promise(10.0, 2.0, "local")
    assert result.receipt == Receipt(1.0, 2.0, 3.0, 4.0, 5)


def test_keyword_arguments_fill_the_request() -> None:
    request = build_request(
        [{"role": "user", "content": "Hi"}],
        {"max_tokens": 4, "stop": "END", "temperature": 0.5, "logit_bias": {7: 1.0}, "logprobs": 2, "user": "alice"},
    )
    assert request.chat.messages[0] == inference_pb2.ChatMessage(role="user", content="Hi")
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (4, ["END"])
    assert (request.sampling.temperature, dict(request.sampling.logit_bias)) == (0.5, {7: 1.0})
    assert (request.logprobs, request.user) == (2, "alice")
    assert list(build_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert build_request("text", {"stop": ["a", "b"]}).stop.stop_strings == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("text", {"max_token": 4}, "'max_token' is not an option; known: model, max_tokens"),
        ("text", {"max_tokens": "many"}, "many|int"),
        ([{"author": "me"}], {}, "a message has role and content, this one has author"),
        ("text", {"tools": [{"name": "f"}]}, "'tools' needs messages as the prompt"),
        ([{"role": "user"}], {"tools": [{"function": {}}]}, "a tool has name, description and parameters, this one"),
        ([{"role": "user"}], {"tool_choice": {"any": True}}, "a tool choice has required, name and single"),
    ],
)
def test_an_argument_that_no_request_has_is_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        build_request(prompt, options)


def test_deltas_of_calls_become_calls_which_a_message_takes_back() -> None:
    chunks = [
        TokenChunk(text="I ask.", token_ids=[1], tool_calls=[Delta(id="c0", name="f", text_offset=6)]),
        TokenChunk(token_ids=[2], tool_calls=[Delta(arguments_json='{"a"'), Delta(arguments_json=": 1}")]),
        TokenChunk(tool_calls=[Delta(index=1, id="c1", name="g"), Delta(index=1, arguments_json="{")]),
    ]
    collector = Collector()
    pieces = [collector.take(inference_pb2.GenerateResponse(tokens=chunk)) for chunk in chunks]
    assert pieces[0] == Piece("I ask.", (1,), (), (ToolCallDelta(0, "c0", "f", "", 6),))
    collector.take(inference_pb2.GenerateResponse(finished=FINISHED))
    result: Any = collector.completion
    assert (result.text, result.finish_reason) == ("I ask.", "length")
    assert result.tool_calls == (ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{"))
    message = {"role": "assistant", "content": result.text, "tool_calls": result.tool_calls[:1]}
    assert build_request([message], {}).chat.messages[0].tool_calls[0] == inference_pb2.ToolCall(
        id="c0", name="f", arguments_json='{"a": 1}'
    )


def test_tools_are_plain_values_or_messages() -> None:
    prompt = [{"role": "user", "content": "Hi"}]
    tools = [{"name": "f", "parameters": {"type": "object"}}, inference_pb2.Tool(name="g")]
    chat = build_request(prompt, {"tools": tools, "tool_choice": {"name": "f", "single": True}}).chat
    assert list(chat.tools) == [
        inference_pb2.Tool(name="f", parameters_json='{"type": "object"}'),
        inference_pb2.Tool(name="g"),
    ]
    assert chat.tool_choice == inference_pb2.ToolChoice(name="f", single=True)
    assert not build_request(prompt, {"tools": tools}).chat.HasField("tool_choice")


def test_a_call_is_part_of_the_span_of_the_program_unless_it_names_another() -> None:
    metadata = [("a", "b")]
    assert with_trace(metadata) == metadata, "outside of a span"
    span = trace.NonRecordingSpan(trace.SpanContext(17, 7, is_remote=False, trace_flags=trace.TraceFlags(1)))
    with trace.use_span(span):
        assert with_trace(metadata) == [("a", "b"), ("traceparent", f"00-{17:032x}-{7:016x}-01")]
        named = [("traceparent", "the caller's")]
        assert with_trace(named) == named
