"""The gateway as the openai client meets it: answers, streams, tools and typed errors.

`test_check.py` asks about whole and streamed answers, deadlines, and clients that leave.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio

from gateway.fleets import Fleets
from gateway.routes.tokens import CHARS_PER_STEP
from tandem_client import AsyncClient
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway
from tests.support.scripted_router import ScriptedRouter, scripted_router
from tests.support.waiting import until

MODEL = "fake:tiny"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NO_RETRIES = {"max_retries": 0}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(running: Deployment) -> AsyncIterator[str]:
    async with serving_gateway(Fleets([running.router.calls])) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def scripted() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router(["Hello ", "world"]) as router:
        yield router


@pytest_asyncio.fixture(loop_scope="module")
async def scripted_client(scripted: ScriptedRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving_gateway(over_the_wire(scripted.address)) as url, client_of(url) as client:
        yield client


def client_of(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="no-key", **(NO_RETRIES | options))


async def test_each_form_of_a_prompt_gives_the_tokens_of_the_grpc_api(
    http: openai.AsyncOpenAI, deployment: Deployment
) -> None:
    direct = await deployment.generate(text="abc", max_tokens=6)
    extra = {"ignore_eos": True, "top_k": -1, "return_token_ids": True}
    own = {"stop_reason": None, "token_ids": direct.token_ids, "prompt_token_ids": [97, 98, 99]}
    for prompt, num in (("abc", 1), ([97, 98, 99], 1), (["abc", "abc"], 2), ([[97, 98, 99], [97, 98, 99]], 2)):
        answer = await http.completions.create(
            model=MODEL, prompt=prompt, max_tokens=6, temperature=0, n=2, extra_body=extra
        )
        assert [choice.index for choice in answer.choices] == list(range(2 * num))
        assert {choice.text for choice in answer.choices} == {direct.text}
        assert [choice.model_extra for choice in answer.choices] == [own] * (2 * num)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3 * num, 12 * num)
    echoed = await http.completions.create(
        model=MODEL, prompt=[97, 98, 99], max_tokens=6, temperature=0, echo=True, extra_body={"ignore_eos": True}
    )
    assert echoed.choices[0].text == f"abc{direct.text}"
    with pytest.raises(openai.BadRequestError, match="repeats at most"):
        await http.completions.create(model=MODEL, prompt=["a" * 2**20] * 2, n=2, echo=True, max_tokens=1)


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(pattern="^[a-z]{2,9}$")]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    likes: Annotated[list[Literal["tea", "coffee"]], pydantic.Field(max_length=2)]


async def test_a_parsed_answer_has_the_form_of_its_class(client: openai.AsyncOpenAI) -> None:
    for seed in range(3):
        options: Any = {"model": MODEL, "seed": seed}
        chat = await client.chat.completions.parse(messages=HELLO, response_format=Person, **options)
        assert isinstance(chat.choices[0].message.parsed, Person)
        async with client.chat.completions.stream(messages=HELLO, response_format=Person, **options) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == chat.choices[0].message.parsed
        response = await client.responses.parse(model=MODEL, input="Hello", text_format=Person)
        assert isinstance(response.output_parsed, Person)


async def test_a_response_streams_typed_events(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "input": "Hello", "instructions": "Be brief.", "temperature": 0}
    whole = await client.responses.create(**options, max_output_tokens=8)
    events = [event async for event in await client.responses.create(**options, max_output_tokens=8, stream=True)]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text != ""
    assert whole.usage is not None
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 8)


async def test_a_prompt_comes_back_from_its_tokens(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        found = (await http.post("/tokenize", json={"model": MODEL, "prompt": "Grüße<|im_end|>"})).json()
        assert (found["count"], found["max_model_len"]) == (len("Grüße".encode()) + 1, 8192)
        back = (await http.post("/detokenize", json={"tokens": found["tokens"]})).json()
        chat = (await http.post("/tokenize", json={"messages": HELLO})).json()
        escaped = (await http.post("/detokenize", json={"tokens": list(b'"\n') * CHARS_PER_STEP})).json()
    assert back == {"prompt": "Grüße<|im_end|>"}
    assert escaped == {"prompt": '"\n' * CHARS_PER_STEP}
    assert chat["count"] > len("Hello")


# ---- errors


async def test_another_route_and_another_method_have_errors_of_the_same_shape(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        unknown, wrong = await http.post("/v1/poems"), await http.get("/v1/completions")
        late = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-tandem-timeout-ms": "soon"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "x-tandem-timeout-ms")


async def test_headers_of_the_request_reach_the_router_and_ask_for_a_receipt(
    scripted: ScriptedRouter, scripted_client: openai.AsyncOpenAI
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": trace, "x-request-id": "mine-1", "x-tandem-receipt": "1"}
    options: Any = {"model": "scripted", "messages": HELLO}
    create = scripted_client.chat.completions.with_raw_response.create
    raw = await create(**options, n=2, store=True, extra_headers=headers)
    assert raw.headers["x-tandem-warning"] == "store has no effect: nothing is stored"
    answer = raw.parse()
    assert answer.usage is not None
    receipt = answer.usage.model_dump()["tandem"]
    assert receipt["promise"] == {"ttft_ms": 12.5, "tpot_ms": 3.0, "path": "disaggregated"}
    assert (receipt["receipt"]["decode_ms"], receipt["receipt"]["kv_block_seconds"]) == (8.0, 1.0)
    # The gateway has a span of its own in the trace of the client.
    assert scripted.metadata[0]["traceparent"].split("-")[1] == trace.split("-")[1]
    assert scripted.metadata[0]["authorization"] == "Bearer no-key"
    assert answer.id == scripted.requests[0].request_id == "mine-1"
    plain = await scripted_client.chat.completions.create(**options)
    assert plain.usage is not None
    assert "tandem" not in plain.usage.model_dump()


async def test_a_full_queue_is_a_rate_limit_with_a_hint_and_a_client_that_leaves_frees_its_place() -> None:
    async with (
        deploy(tiny_config(max_queued=1), num_decode=0) as deployment,
        serving_gateway(over_the_wire(deployment.router_address)) as url,
        client_of(url) as client,
    ):
        shell = deployment.router._shell
        waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", max_tokens=2, stream=True))
        await until(lambda: shell.view.num_queued, "the first request is queued")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt="finds it full", max_tokens=2)
        waiting.cancel()
        await until(lambda: not shell.view.num_queued and not shell.num_open, "the queue is empty")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_an_unexpected_fault_is_an_error_with_an_id(
    scripted: ScriptedRouter, scripted_client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    del scripted
    monkeypatch.setattr("gateway.routes.chat.wire_messages", None)
    with pytest.raises(openai.InternalServerError, match=r"its log names it [0-9a-f]{16}") as failed:
        await scripted_client.chat.completions.create(model="scripted", messages=HELLO)
    assert failed.value.response.headers["x-request-id"]
    async with httpx.AsyncClient() as client:
        page = (await client.get(str(scripted_client.base_url.join("/metrics")))).text
    assert 'tandem_gateway_requests_total{route="/v1/chat/completions",status="500"} 1.0' in page


# ---- Calls of tools over real gRPC are those that HTTP gives, whole and streamed.

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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in the router", "over the wire"])
async def http(request: pytest.FixtureRequest, running: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    local = Fleets([running.router.calls])
    fleets = local if request.param == "in the router" else over_the_wire(running.router_address)
    async with serving_gateway(fleets) as url, client_of(url) as client:
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


async def test_calls_over_grpc_are_those_of_http(deployment: Deployment, http: openai.AsyncOpenAI) -> None:
    async with AsyncClient(deployment.router_address) as client:
        direct = await client.complete(
            MESSAGES, tools=TOOLS, tool_choice={"required": True}, max_tokens=400, seed=5, request_id="mine"
        )
    wanted = [(call.id, call.name, call.arguments_json) for call in direct.tool_calls]
    reason = {"stop": "tool_calls", "length": "length"}[direct.finish_reason]
    assert wanted
    assert direct.text.strip() == "", "the output is calls"
    assert all(json.loads(arguments) for _, name, arguments in wanted[:-1] if name == "weather")
    options: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "tool_choice": "required", "max_tokens": 400, "seed": 5, "extra_body": {"request_id": "mine"},
    }  # fmt: skip
    whole = (await http.chat.completions.create(**options)).choices[0]
    found: Any = whole.message.tool_calls
    assert [(call.id, call.function.name, call.function.arguments) for call in found] == wanted
    assert whole.finish_reason == reason
    *answer, num_deltas = await streamed(await http.chat.completions.create(**options, stream=True))
    assert answer == [wanted, reason]
    # A client that is slow gets the tokens of several steps in one message, so a short call may come in two.
    assert num_deltas / len(wanted) > 3, "arguments stream"
