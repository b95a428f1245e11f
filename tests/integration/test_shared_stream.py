"""Calls that share one gRPC stream: the same answers and refusals as alone, and nothing left when they end."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from core.config import MIN_MESSAGE_BYTES, ApiKeyConfig
from protos import inference_pb2
from runtime.rpc.api_keys import hash_of
from tandem_client import NO_RETRY, AsyncClient, CallFailed, Finished, GenerateRequest
from tests.support.deployment import Deployment, another_router, deploy, make_request, tiny_config
from tests.support.steps import slow_down
from tests.support.waiting import until

TIMEOUT_S = 60.0
SOON_S = 10.0  # 5,000 tokens of a slow worker take 100 s
REQUESTS: dict[str, Any] = {
    "text": make_request(text="one prompt that takes several blocks, for both pools", max_tokens=20),
    "choices": make_request(text="two choices", max_tokens=9, n=2, temperature=1.0, seed=5),
    "logprobs": make_request(token_ids=[5, 6, 7], max_tokens=5, logprobs=2),
    "stop": make_request(token_ids=[9, 8, 7] * 9, max_tokens=30, stop_strings=["e", "a"]),
    "refused": make_request(text="no", max_tokens=3, top_p=2.0),
    "unknown model": make_request(text="no", max_tokens=3, model="other"),
    "without a prompt": GenerateRequest(),
}

Choices = dict[int, tuple[list[int], str, list[float], int]]


def shared(deployment: Deployment) -> AsyncClient:
    return AsyncClient(deployment.router_address, retry=NO_RETRY, shares_stream=True)


async def outcome(client: AsyncClient, request: Any) -> Choices | tuple[Any, ...]:
    """Tokens, text, log-probabilities and finish reason of each choice, or the error."""
    ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    reasons: dict[int, int] = {}
    copy = GenerateRequest()
    copy.CopyFrom(request)
    try:
        async for response in client.generate(copy, TIMEOUT_S):
            if response.HasField("finished"):
                assert response.finished.receipt.decode_ms >= 0
                reasons[response.finished.choice] = response.finished.finish_reason
                continue
            chunk = response.tokens
            ids.setdefault(chunk.choice, []).extend(chunk.token_ids)
            text[chunk.choice] = text.get(chunk.choice, "") + chunk.text
            logprobs.setdefault(chunk.choice, []).extend(entry.logprob for entry in chunk.logprobs)
    except CallFailed as failed:
        return failed.code, str(failed), failed.field, failed.retryable
    return {choice: (ids[choice], text[choice], logprobs[choice], reason) for choice, reason in reasons.items()}


async def test_answers_and_refusals_are_those_of_calls_of_their_own() -> None:
    async with (
        deploy(tiny_config()) as deployment,
        AsyncClient(deployment.router_address, retry=NO_RETRY) as alone,
        shared(deployment) as together,
    ):
        expected = {name: await outcome(alone, request) for name, request in REQUESTS.items()}
        found = await asyncio.gather(*(outcome(together, request) for request in REQUESTS.values()))
        assert dict(zip(REQUESTS, found, strict=True)) == expected
        assert isinstance(expected["choices"], dict)
        assert len(expected["choices"]) == 2
        assert isinstance(expected["refused"], tuple)
        assert expected["refused"][0] is grpc.StatusCode.INVALID_ARGUMENT
        await deployment.settle()


async def test_calls_that_are_left_or_lose_their_client_free_everything() -> None:
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], 0.02)
        async with shared(deployment) as client:
            requests: list[Any] = [make_request(text=f"endless {number}", max_tokens=5000) for number in range(4)]
            endless = [client.generate(request, TIMEOUT_S) for request in requests]
            for responses in endless:
                await anext(responses)
            await endless[0].aclose()
            shell = deployment.router._shell
            assert shell is not None
            await until(lambda: shell.num_open == 3, "one call has ended", SOON_S)
            await anext(endless[1])  # the others go on
        for responses in endless[1:]:
            with contextlib.suppress(CallFailed):
                await responses.aclose()
        await deployment.settle()


async def test_the_longest_messages_of_one_call_break_no_other_call() -> None:
    """At the smallest limit of a message. 16 choices with log-probabilities, joined for a minute, are megabytes."""
    config = tiny_config(max_message_bytes=MIN_MESSAGE_BYTES)
    heavy: Any = make_request(text="heavy", max_tokens=300, n=16, logprobs=20)
    heavy.min_interval_ms = 60_000
    async with deploy(config) as deployment, shared(deployment) as client:
        answer, light = await asyncio.gather(outcome(client, heavy), outcome(client, REQUESTS["text"]))
        assert isinstance(light, dict)
        assert isinstance(answer, dict), answer
        assert [len(ids) for ids, *_ in answer.values()] == [300] * 16
        assert [len(logprobs) for _, _, logprobs, _ in answer.values()] == [300] * 16
        await deployment.settle()


async def test_each_call_has_the_key_of_its_own_client() -> None:
    keys = tuple(ApiKeyConfig(name=name, sha256=hash_of(name * 20)) for name in ("ann", "bob"))
    config = replace(tiny_config(), api_keys=keys)
    async with deploy(config) as deployment, shared(deployment) as client:

        async def ask(key: str) -> Finished:
            metadata = [("authorization", f"Bearer {key * 20}")] if key else []
            request: Any = make_request(text="a prompt of several blocks, all of them the same", max_tokens=2)
            responses = [response async for response in client.generate(request, TIMEOUT_S, metadata)]
            return responses[-1].finished

        assert (await ask("ann")).usage.cached_tokens == 0
        assert (await ask("ann")).usage.cached_tokens > 0
        assert (await ask("bob")).usage.cached_tokens == 0, "the cache of another tenant"
        for key in ("", "eve"):
            with pytest.raises(CallFailed) as failed:
                await ask(key)
            assert failed.value.code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_that_breaks_the_rules_is_refused_by_field() -> None:
    async with deploy(tiny_config()) as deployment:
        stream = deployment.inference.GenerateMany(timeout=TIMEOUT_S)
        await stream.write(inference_pb2.GenerateManyRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="action: must be start or cancel") as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await deployment.settle()


async def test_a_router_that_drains_ends_the_stream_and_its_calls_get_their_answers() -> None:
    async with deploy(tiny_config()) as deployment, another_router(deployment) as other:
        slow_down(deployment.decode[0], 0.02)
        async with shared(deployment) as client:
            expected = await outcome(client, REQUESTS["text"])
            answer = asyncio.create_task(outcome(client, REQUESTS["text"]))
            shell = deployment.router._shell
            assert shell is not None
            await until(lambda: shell.num_open == 1, "the call is open", TIMEOUT_S)
            async with asyncio.timeout(TIMEOUT_S / 2):
                await deployment.router.drain(TIMEOUT_S)
            async with asyncio.timeout(TIMEOUT_S):
                assert await answer == expected, "the drain waits for the call"
            late = await outcome(client, REQUESTS["text"])
            assert isinstance(late, tuple)
            assert (late[0], late[3]) == (grpc.StatusCode.UNAVAILABLE, True), late
        await deployment.router.stop()
        await other.settle()


async def test_calls_that_are_left_after_a_drain_are_unavailable_and_may_be_sent_again() -> None:
    async with deploy(tiny_config()) as deployment, another_router(deployment) as other:
        slow_down(deployment.decode[0], 0.02)
        async with shared(deployment) as client:
            answer = asyncio.create_task(outcome(client, make_request(text="long", max_tokens=500)))
            shell = deployment.router._shell
            assert shell is not None
            await until(lambda: shell.num_open == 1, "the call is open", TIMEOUT_S)
            await deployment.router.drain(0.2)
            await deployment.router.stop()
            lost = await answer
            assert isinstance(lost, tuple)
            assert (lost[0], lost[3]) == (grpc.StatusCode.UNAVAILABLE, True), lost
        await other.settle()
