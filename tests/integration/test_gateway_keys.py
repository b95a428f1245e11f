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


def key_of(name: str) -> str:
    return f"tandem-key-of-{name}"


def config_of(name: str, **options: object) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=hash_of(key_of(name)), **options)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    keys = (config_of("alice"), config_of("carol", max_streams=2))
    async with deploy(replace(tiny_config(), api_keys=keys)) as deployed:
        yield deployed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_gateway(Fleets([deployment.router.calls])) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/api/fleet", "/dashboard/api/requests", "/v1/completions"])
async def test_without_a_valid_key_a_request_gets_401(http: httpx.AsyncClient, path: str) -> None:
    body = {"prompt": "a"} if path.startswith("/v1") else None
    for headers in ([], [(b"authorization", "Bearer kéy".encode())]):
        response = await http.request("POST" if body else "GET", path, json=body, headers=headers)
        assert response.status_code == 401, response.text
        assert body is None or response.json()["error"]["code"] == "invalid_api_key"


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


async def test_more_prompts_than_a_key_may_have_open_are_no_reason_to_try_again(http: httpx.AsyncClient) -> None:
    headers, body = {"authorization": f"Bearer {key_of('carol')}"}, {"max_tokens": 2, "temperature": 0}
    assert (await http.post("/v1/completions", json=body | {"prompt": ["a", "b"]}, headers=headers)).status_code == 200
    refused = await http.post("/v1/completions", json=body | {"prompt": ["a", "b", "c"]}, headers=headers)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "prompt"
    assert "retry-after" not in refused.headers


async def test_what_needs_no_key_over_grpc_needs_none_over_http(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        assert (await http.get(path)).status_code == 200, path
