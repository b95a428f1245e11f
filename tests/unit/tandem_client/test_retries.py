"""A retryable failure before the first token is tried again inside the deadline, and nothing else is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from core.errors import InvalidRequest, QueueFull
from tandem_client import NO_RETRY, AsyncClient, CallFailed, RetryPolicy
from tandem_client.retries import HINT_SPREAD
from tests.support.scripted_router import ScriptedRouter, scripted_router

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


@pytest.mark.parametrize(
    ("failures", "late_failures"),
    [
        pytest.param([InvalidRequest("text", "is empty")], [], id="a fault of the caller"),
        pytest.param([QueueFull("full", retry_after_s=30.0)], [], id="a hint beyond the deadline"),
        pytest.param([], [QueueFull("full")], id="after the first token"),
    ],
)
async def test_other_failures_end_the_call_at_once(
    failures: list[Any], late_failures: list[Any], router: ScriptedRouter
) -> None:
    router.failures, router.late_failures = failures, late_failures
    found, pauses, num_attempts = await ask(router)
    assert isinstance(found, CallFailed)
    assert (pauses, num_attempts) == ([], 1)


@pytest.mark.parametrize(("policy", "num_attempts"), [(RetryPolicy(max_attempts=3), 3), (NO_RETRY, 1)])
async def test_attempts_end_at_their_limit(policy: RetryPolicy, num_attempts: int, router: ScriptedRouter) -> None:
    router.failures = [QueueFull("full", retry_after_s=0.1) for _ in range(9)]
    found, _, num_calls = await ask(router, policy)
    assert isinstance(found, CallFailed)
    assert num_calls == num_attempts


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
