"""A guardrail on the way through the gateway: whole answers and streams, chats and completions."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core.config import GatewayConfig
from gateway.fleets import Fleets
from gateway.prompt_guardrail import ChatText, texts_of
from tandem_client.stubs.inference_pb2 import ChatPrompt
from tests.support.deployment import Deployment
from tests.support.gateway import serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(running: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    config = GatewayConfig(guardrail="tests.support.guardrail:build")
    async with (
        serving_gateway(Fleets([running.router.calls]), config) as url,
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        yield client


async def ask(http: httpx.AsyncClient, kind: str, prompt: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    if kind == "chat":
        return await http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": prompt}]})
    return await http.post("/v1/completions", json=body | {"prompt": prompt})


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The choice of an answer, or its parts from a stream."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        return list(response.json()["choices"])
    *lines, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


both_kinds = pytest.mark.parametrize("kind", ["chat", "completion"])
kinds_and_forms = pytest.mark.parametrize(("kind", "stream"), [("chat", True), ("completion", False)])


@kinds_and_forms
async def test_a_refused_prompt_ends_before_any_token(http: httpx.AsyncClient, kind: str, stream: bool) -> None:
    response = await ask(http, kind, "refuse", stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["message"]) == ("content_policy_violation", "such prompts are not answered")


@both_kinds
async def test_a_rewritten_prompt_is_what_the_model_reads(http: httpx.AsyncClient, kind: str) -> None:
    asked, rewritten = await ask(http, kind, "as it is"), await ask(http, kind, "rewrite")
    tokens = [response.json()["usage"]["prompt_tokens"] for response in (asked, rewritten)]
    assert tokens[1] > tokens[0] + 20


@kinds_and_forms
@pytest.mark.parametrize(
    ("prompt", "shown", "reason"),
    [
        ("mask", "x+", "length"),
        ("hold back", "held", "length"),
        ("end early", ".{0,3}", "content_filter"),
        ("break", "", "content_filter"),
    ],
)
@pytest.mark.usefixtures("deployment")  # which settles: an output that ends early frees the workers
async def test_an_output_is_what_the_guardrail_lets_pass(
    http: httpx.AsyncClient, kind: str, stream: bool, prompt: str, shown: str, reason: str
) -> None:
    choices = choices_of(await ask(http, kind, prompt, stream=stream, max_tokens=100))
    messages = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(message.get("text") or message.get("content") or "" for message in messages)
    assert re.fullmatch(shown, text, re.DOTALL)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]


@both_kinds
@pytest.mark.parametrize("field", ["logprobs", "return_token_ids"])
async def test_tokens_would_show_masked_text_and_are_refused(http: httpx.AsyncClient, kind: str, field: str) -> None:
    response = await ask(http, kind, "mask", **{field: 1 if (kind, field) == ("completion", "logprobs") else True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_responses_pass_the_guardrail_too(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/responses", json={"input": "refuse"})
    assert refused.json()["error"]["code"] == "content_policy_violation"
    masked = await http.post("/v1/responses", json={"input": "mask", "max_output_tokens": 16, "temperature": 0})
    assert masked.status_code == 200, masked.text
    assert set(masked.json()["output"][0]["content"][0]["text"]) <= {"x"}


async def test_a_long_chat_is_prepared_for_the_guardrail_in_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(chat: ChatPrompt) -> list[ChatText]:
        threads.append(threading.current_thread())
        return texts_of(chat)

    monkeypatch.setattr("gateway.routes.chat.texts_of", noted)
    call = {"id": "a", "function": {"name": "f", "arguments": " " * 65_537}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    response = await http.post("/v1/chat/completions", json={"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )
    assert threads[0] is not threading.current_thread()
