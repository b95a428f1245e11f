"""The typed calls: requests from keyword arguments, pieces while the answer streams, and the result at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem_client import AsyncClient, Client, Completion, Credentials, Piece, Promise, Receipt, Usage
from tandem_client.prompts import build_request
from tandem_client.results import Timings, TokenLogprob, TopLogprob
from tandem_client.stubs import inference_pb2, inference_pb2_grpc

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
LOGPROB = inference_pb2.TokenLogprobs(
    logprob=-0.5, token=b"\xc3", top=[inference_pb2.Logprob(token_id=2, logprob=-0.25, token=b"b")]
)
ANSWER = [
    inference_pb2.TokenChunk(text="a", token_ids=[1], logprobs=[LOGPROB]),
    inference_pb2.TokenChunk(text="bc", token_ids=[2, 3], logprobs=[LOGPROB, LOGPROB]),
]


class Router(inference_pb2_grpc.InferenceServicer):
    """Gives ANSWER, and remembers what arrived."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self.headers.append({name: str(value) for name, value in context.invocation_metadata() or ()})
        try:
            for chunk in ANSWER:
                await context.write(inference_pb2.GenerateResponse(tokens=chunk))
            if request.text == "endless":
                await asyncio.Event().wait()
        except asyncio.CancelledError:  # during a write as well
            self.cancelled.set()
            raise
        await context.write(inference_pb2.GenerateResponse(finished=FINISHED))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Router, str]]:
    router, server = Router(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def check(pieces: list[Piece], result: Completion) -> None:
    logprob = TokenLogprob(1, b"\xc3", -0.5, (TopLogprob(2, b"b", -0.25),))
    assert pieces[0] == Piece("a", (1,), (logprob,))
    assert (result.text, result.token_ids, len(result.logprobs)) == ("abc", (1, 2, 3), 3)
    assert (result.finish_reason, result.path, result.request_id, result.seed) == ("length", "disaggregated", "r-1", 9)
    assert result.usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    assert result.timings == Timings(0, 0, 0, 0, 12.5, 0, 0, 0, 20.0)
    assert result.promise == Promise(10.0, 2.0, "local")
    assert result.receipt == Receipt(1.0, 2.0, 3.0, 4.0, 5)


async def test_the_async_client_streams_pieces_and_ends_with_a_result() -> None:
    async with serving() as (_, address), AsyncClient(address) as client:
        stream = client.stream("hello", max_tokens=3)
        with pytest.raises(ValueError, match="has not ended"):
            _ = stream.result
        check([piece async for piece in stream], stream.result)


async def test_the_blocking_client_streams_pieces_and_ends_with_a_result() -> None:
    def read(address: str) -> tuple[list[Piece], Completion]:
        with Client(address) as client:
            stream = client.stream("hello", max_tokens=3)
            return list(stream), stream.result

    async with serving() as (_, address):
        check(*await asyncio.to_thread(read, address))


async def test_leaving_a_stream_early_cancels_the_request() -> None:
    async with serving() as (router, address), AsyncClient(address) as client, asyncio.timeout(10.0):
        async with client.stream("endless") as stream:
            assert (await anext(stream)).text == "a"
        await router.cancelled.wait()


async def test_leaving_a_blocking_stream_early_cancels_the_request() -> None:
    def first_piece(address: str) -> str:
        with Client(address) as client, client.stream("endless") as stream:
            return next(stream).text

    async with serving() as (router, address), asyncio.timeout(10.0):
        assert await asyncio.to_thread(first_piece, address) == "a"
        await router.cancelled.wait()


async def test_the_key_of_the_credentials_goes_with_every_call_that_has_no_key_of_its_own() -> None:
    credentials = Credentials(token="the-token-of-the-cluster", api_key="tk-1")
    async with serving() as (router, address), AsyncClient(address, credentials) as client:
        await client.complete("hello")
        await client.complete("hello", metadata=[("authorization", "Bearer tk-2"), ("x-name", "value")])
    assert [headers["authorization"] for headers in router.headers] == ["Bearer tk-1", "Bearer tk-2"]
    assert router.headers[1]["x-name"] == "value"
    assert all("tandem-cluster-token" not in headers for headers in router.headers)
    assert "tk-1" not in repr(credentials)


def test_keyword_arguments_fill_the_request() -> None:
    request = build_request(
        [{"role": "user", "content": "Hi"}],
        {"max_tokens": 4, "stop": "\n", "temperature": 0.5, "logit_bias": {7: 1.0}, "logprobs": 2, "user": "alice"},
    )
    assert request.chat.messages[0] == inference_pb2.ChatMessage(role="user", content="Hi")
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (4, ["\n"])
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
    ],
)
def test_an_argument_that_no_request_has_is_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        build_request(prompt, options)
