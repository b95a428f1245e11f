"""A retryable failure before the first token is tried again inside the deadline, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.errors import InvalidRequest, QueueFull, TandemError
from runtime.rpc.grpc_server import abort
from tandem_client import NO_RETRY, AsyncClient, CallFailed, Client, RetryPolicy
from tandem_client.retries import HINT_SPREAD
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tandem_client.stubs.inference_pb2 import GenerateRequest

DEFAULT = RetryPolicy()
RETRYABLE = CallFailed(grpc.StatusCode.UNAVAILABLE, "gone", retryable=True)


@dataclass
class Hands:
    """A clock that a sleep moves, and a die that always shows `chance`."""

    chance: float = 0.0
    time: float = 0.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds

    def draw(self) -> float:
        return self.chance


@dataclass
class Flaky(inference_pb2_grpc.InferenceServicer):
    """Fails with each of `errors` in turn, then answers. An error in `late` comes after the first token."""

    errors: list[TandemError] = field(default_factory=list)
    late: bool = False
    num_calls: int = 0
    keys: list[str] = field(default_factory=list)

    async def Generate(self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.num_calls += 1
        self.keys += [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
        if self.errors and not self.late:
            await abort(context, self.errors.pop(0))
        token = inference_pb2.TokenChunk(text=request.text, token_ids=[7])
        await context.write(inference_pb2.GenerateResponse(tokens=token))
        if self.errors:
            await abort(context, self.errors.pop(0))
        finished = inference_pb2.Finished(finish_reason=inference_pb2.FINISH_REASON_STOP)
        await context.write(inference_pb2.GenerateResponse(finished=finished))

    async def GetModel(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> inference_pb2.GetModelResponse:
        self.num_calls += 1
        if self.errors:
            await abort(context, self.errors.pop(0))
        return inference_pb2.GetModelResponse(name="flaky")


@pytest.fixture
def router() -> Flaky:
    return Flaky()


@pytest_asyncio.fixture
async def address(router: Flaky) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


Ask = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, address: str) -> Ask:
    """`await ask(hands, policy)`: the text of one completion, by either client."""

    async def answer(hands: Hands, policy: RetryPolicy = DEFAULT, timeout_s: float = 20.0) -> str:
        if request.param == "sync":

            def blocking() -> str:
                with Client(address, retry=policy, clock=hands) as client:
                    return client.complete("hello", timeout_s=timeout_s).text

            return await asyncio.to_thread(blocking)
        async with AsyncClient(address, retry=policy, clock=hands) as client:
            return (await client.complete("hello", timeout_s=timeout_s)).text

    return answer


async def test_a_retryable_failure_is_tried_again_until_it_answers(ask: Ask, router: Flaky) -> None:
    router.errors = [QueueFull("full", retry_after_s=0.5), QueueFull("full", retry_after_s=3.0)]
    hands = Hands()
    assert await ask(hands) == "hello"
    assert (hands.slept, router.num_calls) == ([0.5, 3.0], 3)


async def test_a_fault_of_the_caller_is_not_tried_again(ask: Ask, router: Flaky) -> None:
    router.errors = [InvalidRequest("text", "is empty")]
    hands = Hands()
    with pytest.raises(CallFailed, match="text: is empty"):
        await ask(hands)
    assert (hands.slept, router.num_calls) == ([], 1)


async def test_nothing_is_tried_again_after_the_first_token(ask: Ask, router: Flaky) -> None:
    router.errors, router.late = [QueueFull("the worker is gone")], True
    hands = Hands()
    with pytest.raises(CallFailed, match="the worker is gone"):
        await ask(hands)
    assert (hands.slept, router.num_calls) == ([], 1)


async def test_a_hint_beyond_the_deadline_ends_the_call_at_once(ask: Ask, router: Flaky) -> None:
    router.errors = [QueueFull("full", retry_after_s=30.0)]
    hands = Hands()
    with pytest.raises(CallFailed, match="full"):
        await ask(hands, timeout_s=20.0)
    assert (hands.slept, router.num_calls) == ([], 1)


async def test_attempts_end_at_their_limit(ask: Ask, router: Flaky) -> None:
    router.errors = [QueueFull("full", retry_after_s=0.1) for _ in range(9)]
    with pytest.raises(CallFailed, match="full"):
        await ask(Hands(), RetryPolicy(max_attempts=3))
    assert router.num_calls == 3
    with pytest.raises(CallFailed, match="full"):
        await ask(Hands(), NO_RETRY)
    assert router.num_calls == 4


@pytest.mark.parametrize("blocking", [True, False])
async def test_other_calls_of_clients_are_tried_again_too(blocking: bool, address: str, router: Flaky) -> None:
    router.errors, hands = [QueueFull("full")], Hands()
    if blocking:
        with Client(address, clock=hands) as client:
            assert (await asyncio.to_thread(client.model)).name == "flaky"
    else:
        async with AsyncClient(address, clock=hands) as client:
            assert (await client.model()).name == "flaky"
    assert hands.slept == [1.0]


def test_pauses_double_up_to_a_limit_and_half_of_each_is_random() -> None:
    policy = RetryPolicy(max_attempts=9, first_pause_s=0.1, max_pause_s=1.0)
    assert [policy.pause_s(RETRYABLE, attempts, 60.0, 1.0) for attempts in range(1, 6)] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert policy.pause_s(RETRYABLE, 1, 60.0, 0.0) == 0.05
    assert policy.pause_s(RETRYABLE, 9, 60.0, 0.0) is None


def test_a_pause_is_never_shorter_than_the_hint_and_spreads_the_clients() -> None:
    hinted = CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retryable=True, retry_after_s=4.0)
    assert RetryPolicy().pause_s(hinted, 1, 60.0, 0.0) == 4.0
    assert RetryPolicy().pause_s(hinted, 1, 60.0, 1.0) == 4.0 * (1 + HINT_SPREAD)
    assert RetryPolicy().pause_s(hinted, 1, 4.0, 0.0) is None


def test_a_policy_that_cannot_work_is_refused() -> None:
    for wrong in ({"max_attempts": 0}, {"first_pause_s": -1.0}, {"first_pause_s": 3.0}):
        with pytest.raises(ValueError, match="max_attempts must be at least 1"):
            RetryPolicy(**wrong)
