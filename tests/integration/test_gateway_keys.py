"""API keys through the gateway, which passes them on: the statuses and headers that clients of OpenAI know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from core.config import ApiKeyConfig
from gateway.fleets import Fleets
from runtime.rpc.api_keys import hash_of
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "a prompt that is longer than two blocks of sixteen tokens each"


def key_of(name: str) -> str:
    return f"tandem-key-of-{name}"


def config_of(name: str, **options: object) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=hash_of(key_of(name)), **options)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    keys = (
        config_of("alice"),
        config_of("bob", requests_per_minute=1),
        config_of("carol", max_streams=2),
        config_of("olga", operator=True),
    )
    async with deploy(replace(tiny_config(), api_keys=keys)) as deployed:
        yield deployed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_gateway(Fleets([deployment.router.calls])) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
    ):
        yield client


async def complete(http: httpx.AsyncClient, authorization: str = "", **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | fields
    headers = {"authorization": authorization} if authorization else {}
    return await http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Basic YTpi", key_of("alice"), "Bearer kéy"])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_valid_key_a_request_gets_401(
    http: httpx.AsyncClient, authorization: str, stream: bool
) -> None:
    response = await http.post(
        "/v1/completions",
        json={"prompt": PROMPT, "stream": stream},
        headers=[(b"authorization", authorization.encode())] if authorization else [],
    )
    assert response.status_code == 401, response.text
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "key" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_over_the_wire", [False, True])
async def test_an_unknown_key_is_refused_before_the_body_comes(deployment: Deployment, is_over_the_wire: bool) -> None:
    fleets = over_the_wire(deployment.router_address) if is_over_the_wire else Fleets([deployment.router.calls])
    async with serving_gateway(fleets) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        for key, answer in ((key_of("alice"), b"HTTP/1.1 400"), ("unknown", b"HTTP/1.1 401")):
            body = b"" if answer.endswith(b"401") else b"{}"
            head = f"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer {key}\r\ncontent-length: 2\r\n\r\n"
            writer.write(head.encode() + body)
            async with asyncio.timeout(20):
                whole = await reader.readuntil(b"}}")
            assert whole.startswith(answer), whole
        writer.close()


async def test_a_key_beyond_its_limit_gets_429_with_the_seconds_to_wait(http: httpx.AsyncClient) -> None:
    assert (await complete(http, f"Bearer {key_of('bob')}")).status_code == 200
    response = await complete(http, f"Bearer {key_of('bob')}")
    assert response.status_code == 429
    assert 30 <= int(response.headers["retry-after"]) <= 60
    assert "'bob' has made 1 requests in the last minute, its limit" in response.json()["error"]["message"]


async def test_more_prompts_than_a_key_may_have_open_are_no_reason_to_try_again(http: httpx.AsyncClient) -> None:
    carol = f"Bearer {key_of('carol')}"
    assert (await complete(http, carol, prompt=["a", "b"])).status_code == 200
    refused = await complete(http, carol, prompt=["a", "b", "c"])
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "prompt"
    assert "retry-after" not in refused.headers


async def test_what_needs_no_key_over_grpc_needs_none_over_http(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        assert (await http.get(path)).status_code == 200, path


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/api/fleet", "/dashboard/api/requests"])
@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Bearer kéy"])
async def test_pages_of_operators_refuse_every_other_key(
    http: httpx.AsyncClient, path: str, authorization: str
) -> None:
    headers = [(b"authorization", authorization.encode())] if authorization else []
    response = await http.get(path, headers=headers)
    assert response.status_code == 401, response.text
