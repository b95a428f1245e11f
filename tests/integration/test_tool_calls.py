"""Calls of tools over real gRPC are those that HTTP gives, in any number of chunks, resumed or not, for each choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.fleets import Fleets
from tandem_client import AsyncClient, Client
from tandem_client.prompts import build_request
from tandem_client.resuming import Answer
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, another_router, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake:tiny"  # a token is a byte
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[a-zé☃]{2,9}$"},
        "days": {"type": "array", "items": {"enum": [1, 2, {"a": None}]}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [{"name": "weather", "parameters": SCHEMA}, {"name": "now"}]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Bonn?"}]
LIMIT = 400  # tokens
Call = dict[str, str]


@dataclass
class Received:
    """One choice."""

    text: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    num_deltas: int = 0
    token_ids: list[int] = field(default_factory=list)
    chunks: list[inference_pb2.TokenChunk] = field(default_factory=list)
    reason: str = ""
    num_calls: int = 0
    started: inference_pb2.Started | None = None

    def take_chunk(self, chunk: inference_pb2.TokenChunk) -> None:
        self.chunks.append(chunk)
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        for delta in chunk.tool_calls:
            self.take_call(delta.index, delta.id, delta.name, delta.arguments_json)

    def take_call(self, index: int, call_id: str, name: str, arguments: str) -> None:
        self.num_deltas += 1
        call = self.calls.setdefault(index, {"id": call_id, "name": name, "arguments": ""})
        call["arguments"] += arguments

    @property
    def told(self) -> tuple[str, dict[int, Call]]:
        return self.text, self.calls


def request_of(seed: int, **fields: Any) -> inference_pb2.GenerateRequest:
    options = {"tools": TOOLS, "tool_choice": {"required": True}, "max_tokens": LIMIT, "seed": seed}
    request = build_request(MESSAGES, options | {"request_id": f"mine-{seed}"})
    request.MergeFrom(inference_pb2.GenerateRequest(**fields))
    return request


async def over_grpc(deployment: Deployment, request: inference_pb2.GenerateRequest) -> list[Received]:
    received = [Received() for _ in range(request.n or 1)]
    async for response in deployment.inference.Generate(request, timeout=60.0):
        if response.HasField("started"):
            received[0].started = response.started
            continue
        if response.HasField("finished"):
            end = response.finished
            received[end.choice].reason = inference_pb2.FinishReason.Name(end.finish_reason)
            received[end.choice].num_calls = end.num_tool_calls
            continue
        received[response.tokens.choice].take_chunk(response.tokens)
    return received


async def over_http(http: httpx.AsyncClient, seed: int, **fields: Any) -> list[Received]:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "tool_choice": "required",
        "request_id": f"mine-{seed}",
        "seed": seed,
        "max_tokens": LIMIT,
    }
    answer = await http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    received = [Received() for _ in range(fields.get("n", 1))]
    if not fields.get("stream"):
        for choice in answer.json()["choices"]:
            own = received[choice["index"]]
            own.text, own.reason = choice["message"]["content"] or "", choice["finish_reason"]
            for index, call in enumerate(choice["message"].get("tool_calls", ())):
                own.take_call(index, call["id"], call["function"]["name"], call["function"]["arguments"])
        return received
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            own, delta = received[choice["index"]], choice["delta"]
            own.text += delta.get("content", "")
            own.reason = choice["finish_reason"] or own.reason
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                own.take_call(call["index"], call.get("id", ""), function.get("name", ""), function["arguments"])
    return received


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(local_prefill="auto"), num_prefill=0) as deployed:
        yield deployed


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in the router", "over the wire"])
async def http(request: pytest.FixtureRequest, deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    local = Fleets([deployment.router.calls])
    fleets = local if request.param == "in the router" else over_the_wire(deployment.router_address)
    async with serving_gateway(fleets) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        yield client


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_deltas_over_grpc_are_those_of_http(
    deployment: Deployment, http: httpx.AsyncClient, num_choices: int
) -> None:
    for seed in (1, 5):
        direct = await over_grpc(deployment, request_of(seed, n=num_choices))
        assert all(own.calls and own.text.strip() == "" for own in direct), "the output is calls"
        for stream in (True, False):
            answered = await over_http(http, seed, n=num_choices, stream=stream)
            assert [own.calls for own in answered] == [own.calls for own in direct]
            reasons = {"FINISH_REASON_STOP": "tool_calls", "FINISH_REASON_LENGTH": "length"}
            assert [own.reason for own in answered] == [reasons[own.reason] for own in direct]
        for own in direct:
            assert own.num_calls >= len(own.calls) - (own.reason == "FINISH_REASON_LENGTH")
            for call in own.calls.values():
                assert call["name"] in ("weather", "now")
                if own.reason == "FINISH_REASON_STOP":
                    json.loads(call["arguments"])
        # A client that is slow gets the tokens of several steps in one message, so a short call may come in two.
        assert max(own.num_deltas / len(own.calls) for own in direct) > 3, "arguments stream"
    await deployment.settle()


async def test_joined_messages_tell_the_same_calls(deployment: Deployment) -> None:
    request = request_of(5)
    (single,) = await over_grpc(deployment, request)
    request.min_interval_ms = 50
    (joined,) = await over_grpc(deployment, request)
    assert (joined.told, joined.token_ids) == (single.told, single.token_ids)
    assert joined.num_deltas < single.num_deltas


async def test_an_output_of_max_tokens_keeps_the_arguments_so_far(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    request = request_of(5)
    (whole,) = await over_grpc(deployment, request)
    for max_tokens in range(1, len(whole.token_ids), 7):
        request.stop.max_tokens = max_tokens
        (cut,) = await over_grpc(deployment, request)
        assert cut.reason == "FINISH_REASON_LENGTH"
        (streamed,) = await over_http(http, 5, stream=True, max_tokens=max_tokens)
        assert streamed.told == cut.told
        assert streamed.reason == "length"
        for index, call in cut.calls.items():
            assert whole.calls[index]["arguments"].startswith(call["arguments"])


def told_one_by_one(chunks: Iterable[inference_pb2.TokenChunk]) -> list[tuple[Any, ...]]:
    """The characters of the text and of the arguments, and the announced calls, in order."""
    found: list[tuple[Any, ...]] = []
    for chunk in chunks:
        position = 0
        for delta in chunk.tool_calls:
            found += [("text", character) for character in chunk.text[position : delta.text_offset]]
            position = delta.text_offset
            found += [("call", delta.index, delta.id, delta.name)] if delta.id else []
            found += [(delta.index, character) for character in delta.arguments_json]
        found += [("text", character) for character in chunk.text[position:]]
    return found


async def test_resumed_at_every_index_the_calls_are_the_undisturbed_ones(deployment: Deployment) -> None:
    request = request_of(5)
    (whole,) = await over_grpc(deployment, request)
    assert whole.started is not None
    assert whole.calls
    all_told, lacking = told_one_by_one(whole.chunks), {}  # index -> what a client with so many tokens lacks
    for number, chunk in enumerate(whole.chunks):
        lacking[chunk.index + len(chunk.token_ids)] = told_one_by_one(whole.chunks[number + 1 :])

    async def check(other: Deployment, index: int) -> None:
        answer = Answer(request)
        answer.take(inference_pb2.GenerateResponse(started=whole.started))
        answer.take(inference_pb2.GenerateResponse(tokens=inference_pb2.TokenChunk(token_ids=whole.token_ids[:index])))
        (rest,) = await over_grpc(other, answer.next_request())
        told = told_one_by_one(rest.chunks)
        assert told == all_told[len(all_told) - len(told) :], index
        assert told == lacking.get(index, told), index
        assert rest.num_calls == whole.num_calls, "Finished counts the whole answer"

    async with another_router(deployment) as other:
        await asyncio.gather(*(check(other, index) for index in range(1, len(whole.token_ids) + 1)))
    assert len(lacking) > 9, "the answer has come in several chunks"


async def test_both_clients_give_typed_calls_that_the_next_prompt_takes(deployment: Deployment) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": {"name": "weather", "single": True}, "max_tokens": LIMIT, "seed": 2}
    async with AsyncClient(deployment.router_address) as client:
        async with client.stream(MESSAGES, **options) as stream:
            pieces = [piece async for piece in stream]
        (call,) = stream.result.tool_calls
        assert call.name == "weather"
        assert "".join(delta.arguments_json for piece in pieces for delta in piece.tool_calls) == call.arguments_json
        assert set(json.loads(call.arguments_json)) == {"city", "days"}
        asked = {"role": "assistant", "content": stream.result.text, "tool_calls": stream.result.tool_calls}
        answered = {"role": "tool", "tool_call_id": call.id, "content": "25 C"}
        final = await client.complete([*MESSAGES, asked, answered], tools=TOOLS, max_tokens=4)
        assert final.usage.completion_tokens > 0

    def blocking() -> str:
        with Client(deployment.router_address) as client:
            return client.complete(MESSAGES, **options).tool_calls[0].arguments_json

    assert await asyncio.to_thread(blocking) == call.arguments_json


async def test_without_tools_the_text_of_a_call_stays_text(deployment: Deployment) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    request = request_of(1, output_format=inference_pb2.OutputFormat(choices=inference_pb2.Choices(texts=[text])))
    request.chat.ClearField("tools")
    request.chat.ClearField("tool_choice")
    (found,) = await over_grpc(deployment, request)
    assert (found.text, found.calls, found.num_calls) == (text, {}, 0)
