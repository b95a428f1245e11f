"""A retryable failure before the first token is tried again inside the deadline, and nothing else is. Behind the first
token, an answer goes on at another router with the tokens that the caller has, and the caller gets each token once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.errors import InvalidRequest, QueueFull, WorkerUnavailable
from tandem_client import NO_RETRY, AsyncClient, CallFailed, RetryPolicy
from tandem_client.resuming import Answer
from tandem_client.retries import HINT_SPREAD
from tandem_client.stubs.inference_pb2 import (
    FINISH_REASON_LENGTH,
    Finished,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    Started,
    TokenChunk,
)
from tests.support.scripted_router import LOST, Failure, ScriptedRouter, fail, scripted_router

DEFAULT = RetryPolicy()
RETRYABLE = CallFailed(grpc.StatusCode.UNAVAILABLE, "gone", retryable=True)


@dataclass
class FakeClock:
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


@pytest_asyncio.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router(["hello"]) as router:
        yield router


async def ask(router: ScriptedRouter, policy: RetryPolicy = DEFAULT) -> tuple[CallFailed | str, list[float], int]:
    """(the text or the failure of one completion, the pauses, the number of attempts)."""
    clock = FakeClock()
    router.requests.clear()
    async with AsyncClient(router.address, retry=policy, clock=clock) as client:
        try:
            found: CallFailed | str = (await client.complete("hello", timeout_s=20.0)).text
        except CallFailed as error:
            found = error
    return found, clock.slept, len(router.requests)


async def test_a_retryable_failure_is_tried_again_until_it_answers(router: ScriptedRouter) -> None:
    router.failures = [QueueFull("full", retry_after_s=0.5), QueueFull("full", retry_after_s=3.0)]
    assert await ask(router) == ("hello", [0.5, 3.0], 3)


async def test_the_deadline_of_a_later_attempt_names_the_time_limit_of_the_call(router: ScriptedRouter) -> None:
    router.failures, router.hold = [QueueFull("full", retry_after_s=19.9)], asyncio.Event()
    failed, slept, num_attempts = await ask(router)
    assert (slept, num_attempts) == ([19.9], 2)
    assert str(failed) == f"no answer from the router at {router.address} within 20 s; see `tandem status`"


FULL: list[Failure] = [QueueFull("full", retry_after_s=0.1)] * 9


@pytest.mark.parametrize(
    ("policy", "failures", "late_failures", "pauses"),
    [
        pytest.param(DEFAULT, [InvalidRequest("text", "is empty")], [], [], id="a fault of the caller"),
        pytest.param(DEFAULT, [QueueFull("full", retry_after_s=30.0)], [], [], id="a hint beyond the deadline"),
        pytest.param(DEFAULT, [], [QueueFull("full")], [], id="after the first token"),
        pytest.param(NO_RETRY, FULL, [], [], id="no retry"),
        pytest.param(RetryPolicy(max_attempts=3), FULL, [], [0.1, 0.1], id="the last attempt"),
    ],
)
async def test_other_failures_and_the_last_attempt_end_the_call(
    policy: RetryPolicy, failures: list[Failure], late_failures: list[Failure], pauses: list[float],
    router: ScriptedRouter,
) -> None:  # fmt: skip
    router.failures, router.late_failures = [*failures], [*late_failures]
    found, slept, num_attempts = await ask(router, policy)
    assert isinstance(found, CallFailed)
    assert (slept, num_attempts) == (pauses, len(pauses) + 1)


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
    RetryPolicy(max_attempts=1, first_pause_s=2.0, max_pause_s=2.0)


# ---- resumed answers

OUTPUT = [10, 11, 12, 13, 14, 15]


def started(seed: int = 5, prompt_tokens: int = 7) -> GenerateResponse:
    return GenerateResponse(started=Started(request_id="r", seed=seed, prompt_tokens=prompt_tokens, max_tokens=9))


def chunk(*token_ids: int, choice: int = 0, text: str = "") -> GenerateResponse:
    return GenerateResponse(tokens=TokenChunk(choice=choice, token_ids=token_ids, text=text))


def end(choice: int = 0) -> GenerateResponse:
    return GenerateResponse(finished=Finished(choice=choice, finish_reason=FINISH_REASON_LENGTH))


async def tokens_of(responses: AsyncIterator[GenerateResponse]) -> list[int]:
    return [token_id async for response in responses for token_id in response.tokens.token_ids]


@dataclass
class DyingRouter(ScriptedRouter):
    """Sends Started, and some tokens of OUTPUT before each call fails; the last call ends well."""

    num_before: list[int] = field(default_factory=list)  # tokens of each failing call
    prompt_tokens: list[int] = field(default_factory=list)  # of each Started; then 7
    failure: Failure = LOST

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        yield started(prompt_tokens=self.prompt_tokens.pop(0) if self.prompt_tokens else 7)
        rest = OUTPUT[len(request.resume) :]
        if self.num_before:
            for token_id in rest[: self.num_before.pop(0)]:
                yield chunk(token_id, text=f"{token_id} ")
            await fail(context, [self.failure])
        for token_id in rest:
            yield chunk(token_id, text=f"{token_id} ")
        yield end()


async def test_an_answer_goes_on_behind_the_tokens_that_the_caller_has() -> None:
    router = DyingRouter([], num_before=[2, 0, 3])
    async with scripted_router([], router), AsyncClient(router.address) as client:
        completion = await client.complete("hello", temperature=1.0)
    assert list(completion.token_ids) == OUTPUT
    assert completion.text == "10 11 12 13 14 15 "
    assert [list(request.resume) for request in router.requests] == [[], OUTPUT[:2], OUTPUT[:2], OUTPUT[:5]]
    first, second = router.requests[:2]
    assert not first.sampling.HasField("seed")
    assert (second.sampling.seed, second.request_id, second.stop.max_tokens) == (5, "r", 9)
    assert (second.text, second.sampling.temperature) == ("hello", 1.0)


@pytest.mark.parametrize(("failure", "num_requests"), [(LOST, (1, 1)), (WorkerUnavailable("drains"), (2, 0))])
async def test_the_next_of_several_addresses_gets_the_answer_of_a_lost_router_and_of_no_other(
    failure: Failure, num_requests: tuple[int, int]
) -> None:
    first, second = DyingRouter([], num_before=[3], failure=failure), DyingRouter([])
    async with scripted_router([], first), scripted_router([], second):
        async with AsyncClient([first.address, second.address]) as client:
            assert list((await client.complete("hello")).token_ids) == OUTPUT
        assert (len(first.requests), len(second.requests)) == num_requests


async def test_attempts_without_a_new_token_are_bounded() -> None:
    router = DyingRouter([], num_before=[1] + [0] * 20)
    async with scripted_router([], router), AsyncClient(router.address, resume=RetryPolicy(max_attempts=3)) as client:
        with pytest.raises(CallFailed, match="went away in the middle of the answer"):
            await client.complete("hello")
    assert len(router.requests) == 3


@pytest.mark.parametrize(
    ("num_tokens", "failure", "resumes"),
    [(2, LOST, True), (2, WorkerUnavailable("drains"), True), (0, LOST, True), (0, QueueFull("full"), False)],
)
async def test_a_refusal_before_the_first_token_is_the_callers_and_every_other_loss_is_not(
    num_tokens: int, failure: Failure, resumes: bool
) -> None:
    router = DyingRouter([], num_before=[num_tokens], failure=failure)
    async with scripted_router([], router), AsyncClient(router.address) as client:
        responses = client.generate(GenerateRequest(text="hello"), 20.0)
        if resumes:
            assert await tokens_of(responses) == OUTPUT
        else:
            with pytest.raises(CallFailed, match="full"):
                [r async for r in responses]
    assert len(router.requests) == 1 + resumes


async def test_a_call_outlasts_the_connection_that_a_leaving_router_never_served() -> None:
    """Routers of a machine share a port, so the kernel may give a connection to the one that is about to close."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as leaving:
        leaving.setblocking(False)
        router = DyingRouter([], address=f"127.0.0.1:{leaving.getsockname()[1]}")
        async with AsyncClient(router.address) as client:
            answering = asyncio.create_task(tokens_of(client.generate(GenerateRequest(text="hello"), 20.0)))
            connection, _ = await asyncio.get_running_loop().sock_accept(leaving)
            leaving.close()
            async with scripted_router([], router):
                connection.close()
                assert await answering == OUTPUT


async def test_a_router_that_counts_another_prompt_does_not_continue() -> None:
    router = DyingRouter([], num_before=[2], prompt_tokens=[7, 8])
    async with scripted_router([], router), AsyncClient(router.address) as client:
        with pytest.raises(CallFailed, match="counts 8 prompt tokens, the first one counted 7") as failed:
            await client.complete("hello")
    assert not failed.value.retryable


def test_choices_are_continued_one_after_the_other_each_with_its_seed() -> None:
    request = GenerateRequest(text="hello", n=3, sampling=SamplingParams(seed=2**63 - 2))
    answer = Answer(request)
    answer.take(started(seed=2**63 - 2))
    for response in (chunk(1), chunk(2, choice=1), chunk(3, choice=2), end(choice=0)):
        answer.take(response)
    following = answer.next_request()
    assert (following.n, following.sampling.seed, list(following.resume)) == (1, 2**63 - 1, [2])
    assert answer.take(started(seed=2**63 - 1)) is None
    taken: Any = answer.take(chunk(4))
    assert taken.tokens.choice == 1
    answer.take(end())
    assert answer.call_has_ended
    assert not answer.has_ended
    following = answer.next_request()
    assert (following.sampling.seed, list(following.resume)) == (0, [3])


def test_the_rest_of_the_text_comes_once() -> None:
    answer = Answer(GenerateRequest(text="hello"))
    answer.take(started())
    answer.take(chunk(1))
    assert answer.take(chunk(text="rest")) is not None
    answer.next_request()
    assert answer.take(chunk(text="rest")) is None
    answer.take(end())
    assert answer.has_ended


def test_a_caller_may_resume_by_itself_through_the_client() -> None:
    answer = Answer(GenerateRequest(text="hello", resume=[1, 2]))
    answer.take(started())
    answer.take(chunk(3))
    assert list(answer.next_request().resume) == [1, 2, 3]
