"""Calls of tools over real gRPC are those that HTTP gives, resumed or not, for each choice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.fleets import Fleets
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
    reason: str = ""
    num_calls: int = 0

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.text += response.tokens.text
        for delta in response.tokens.tool_calls:
            self.take_call(delta.index, delta.id, delta.name, delta.arguments_json)
        if response.HasField("finished"):
            self.reason = inference_pb2.FinishReason.Name(response.finished.finish_reason)
            self.num_calls = response.finished.num_tool_calls

    def take_call(self, index: int, call_id: str, name: str, arguments: str) -> None:
        self.num_deltas += 1
        call = self.calls.setdefault(index, {"id": call_id, "name": name, "arguments": ""})
        call["arguments"] += arguments


def request_of(seed: int, **fields: Any) -> inference_pb2.GenerateRequest:
    options = {"tools": TOOLS, "tool_choice": {"required": True}, "max_tokens": LIMIT, "seed": seed}
    request = build_request(MESSAGES, options | {"request_id": f"mine-{seed}"})
    request.MergeFrom(inference_pb2.GenerateRequest(**fields))
    return request


async def over_grpc(deployment: Deployment, request: inference_pb2.GenerateRequest) -> list[Received]:
    received = [Received() for _ in range(request.n or 1)]
    async for response in deployment.inference.Generate(request, timeout=60.0):
        part = response.finished if response.HasField("finished") else response.tokens
        received[part.choice].take(response)
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


async def test_deltas_over_grpc_are_those_of_http(deployment: Deployment, http: httpx.AsyncClient) -> None:
    direct = await over_grpc(deployment, request_of(5, n=3))
    assert all(own.calls and own.text.strip() == "" for own in direct), "the output is calls"
    for stream in (True, False):
        answered = await over_http(http, 5, n=3, stream=stream)
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


async def test_another_router_resumes_inside_a_call(deployment: Deployment) -> None:
    request, whole, head = request_of(5), Received(), Received()
    answer = Answer(request)
    async for response in deployment.inference.Generate(request, timeout=60.0):
        whole.take(response)
        if head.num_deltas < 3:
            head.take(response)
            answer.take(response)
    async with another_router(deployment) as other:
        async for response in other.inference.Generate(answer.next_request(), timeout=60.0):
            head.take(response)
    assert (head.text, head.calls) == (whole.text, whole.calls)
    assert head.num_calls == whole.num_calls, "Finished counts the whole answer"
    assert whole.num_deltas > 5, "the answer has come in several chunks"
