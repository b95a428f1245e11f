"""API keys on a real router, over gRPC and HTTP: who may call, for which tenant, and how much."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.config import ApiKeyConfig, SecurityConfig, TelemetryConfig
from gateway.fleets import Fleets
from runtime.rpc.api_keys import hash_of
from tandem_client import NO_RETRY, AsyncClient, CallFailed, Credentials
from tandem_client.stubs.inference_pb2 import GenerateRequest
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import serving_gateway
from tests.support.waiting import until

TOKEN = "the-token-of-this-cluster"
KEYS = ("bob", "team-a", "team-b", "olga", "carol")
PROMPT = list(range(3, 3 + 64))


def key_of(name: str) -> str:
    return f"tandem-key-of-{name}"


def config_of(name: str, **options: object) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=hash_of(key_of(name)), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spans") / "spans.jsonl"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(trace_file: Path) -> AsyncIterator[Deployment]:
    config = replace(
        tiny_config(telemetry=TelemetryConfig(trace_file=str(trace_file))),
        security=SecurityConfig(cluster_token=TOKEN),
        api_keys=(
            config_of("bob", requests_per_minute=1),
            config_of("team-a", tenant="team"),
            config_of("team-b", tenant="team"),
            config_of("olga", operator=True),
            config_of("carol", max_streams=2),
        ),
    )
    async with deploy(config) as deployed:
        yield deployed


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def client(deployment: Deployment, name: str = "") -> AsyncClient:
    return AsyncClient(deployment.router_address, Credentials(api_key=key_of(name) if name else ""), NO_RETRY)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_without_a_key_a_client_learns_the_model_and_nothing_else(deployment: Deployment) -> None:
    async with client(deployment) as nobody:
        assert (await nobody.model()).name
        token = "this call needs an API key of an operator, or the cluster's token"
        for call, says in (
            (nobody.complete([1, 2], max_tokens=2), "this call needs an API key: send"),
            (nobody.fleet(), token),
            (nobody.explain(GenerateRequest(text="hi")), token),
        ):
            with pytest.raises(CallFailed, match=says) as failed:
                await call
            assert failed.value.code is grpc.StatusCode.UNAUTHENTICATED
            assert not failed.value.retryable
    async with grpc.aio.insecure_channel(deployment.router_address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_tenants_share_no_cached_prefix_and_two_keys_of_a_tenant_do(deployment: Deployment) -> None:
    async def cached(name: str, user: str = "") -> int:
        async with client(deployment, name) as one:
            answer = await one.complete(PROMPT, max_tokens=2, temperature=0, user=user)
        await deployment.settle()
        return answer.usage.cached_tokens

    assert await cached("team-a") == 0
    assert await cached("team-b") > 0
    assert await cached("olga", user="team") == 0  # to name another tenant is of no use


async def test_refusals_are_counted_by_their_reason(deployment: Deployment) -> None:
    async def counted(operator: AsyncClient) -> dict[str, int]:
        page = await operator.metrics()
        found = re.findall(r'^tandem_refusals_total\{reason="(\w+)"\} (\d+)', page, re.MULTILINE)
        return {reason: int(count) for reason, count in found}

    async with (
        client(deployment) as nobody, client(deployment, "bob") as bob, client(deployment, "olga") as olga,
    ):  # fmt: skip
        await bob.complete("hi", max_tokens=1)
        before = await counted(olga)
        for call in (nobody.complete("hi"), bob.complete("hi"), bob.fleet(), bob.metrics()):
            with pytest.raises(CallFailed):
                await call
        after = await counted(olga)
    grown = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    assert {reason: count for reason, count in grown.items() if count} == {
        "unauthenticated": 1, "key_limit_reached": 1, "permission_denied": 2,
    }  # fmt: skip


async def test_no_log_and_no_span_shows_a_key_or_the_token_of_the_cluster(
    deployment: Deployment, trace_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with client(deployment, "team-a") as user, asyncio.timeout(20.0):
        done = await user.complete("say something", max_tokens=2, request_id="watched")
        with pytest.raises(CallFailed):
            await user.fleet()
    await until(lambda: "watched" in text_of(trace_file), "the span is written")
    shown = caplog.text + text_of(trace_file) + repr(deployment.config) + repr(done)
    assert caplog.text
    assert not any(key_of(name) in shown or hash_of(key_of(name)) in shown for name in KEYS)
    assert TOKEN not in shown


# ---- through the gateway, which passes keys on: the statuses and headers that clients of OpenAI know


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
