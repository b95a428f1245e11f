"""Calls of tools over real gRPC are those that HTTP gives, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.fleets import Fleets
from tandem_client import AsyncClient
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
Call = tuple[str, str, str]  # id, name, arguments


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(local_prefill="auto"), num_prefill=0) as deployed:
        yield deployed


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in the router", "over the wire"])
async def http(request: pytest.FixtureRequest, deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    local = Fleets([deployment.router.calls])
    fleets = local if request.param == "in the router" else over_the_wire(deployment.router_address)
    async with serving_gateway(fleets) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


async def streamed(stream: Any) -> tuple[list[Call], str, int]:
    """The calls, why the answer ended, and the number of deltas."""
    calls: list[Call] = []
    reason, num_deltas = "", 0
    async for event in stream:
        (choice,) = event.choices
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            num_deltas += 1
            if delta.id:
                calls.append((delta.id, delta.function.name, ""))
            call_id, name, arguments = calls[delta.index]
            calls[delta.index] = (call_id, name, arguments + (delta.function.arguments or ""))
    return calls, reason, num_deltas


@pytest.mark.parametrize("seed", [5, 7])
async def test_calls_over_grpc_are_those_of_http(deployment: Deployment, http: openai.AsyncOpenAI, seed: int) -> None:
    async with AsyncClient(deployment.router_address) as client:
        direct = await client.complete(
            MESSAGES, tools=TOOLS, tool_choice={"required": True}, max_tokens=400, seed=seed, request_id=f"mine-{seed}"
        )
    wanted = [(call.id, call.name, call.arguments_json) for call in direct.tool_calls]
    reason = {"stop": "tool_calls", "length": "length"}[direct.finish_reason]
    assert wanted
    assert direct.text.strip() == "", "the output is calls"
    assert all(json.loads(arguments) for _, name, arguments in wanted[:-1] if name == "weather")
    options: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "tool_choice": "required", "max_tokens": 400, "seed": seed, "extra_body": {"request_id": f"mine-{seed}"},
    }  # fmt: skip
    whole = (await http.chat.completions.create(**options)).choices[0]
    found: Any = whole.message.tool_calls
    assert [(call.id, call.function.name, call.function.arguments) for call in found] == wanted
    assert whole.finish_reason == reason
    *answer, num_deltas = await streamed(await http.chat.completions.create(**options, stream=True))
    assert answer == [wanted, reason]
    # A client that is slow gets the tokens of several steps in one message, so a short call may come in two.
    assert num_deltas / len(wanted) > 3, "arguments stream"
    await deployment.settle()
