"""When a failed call is sent again, and after which pause. A call is retried inside its deadline, or not at all.

A call is sent again only if its failure is retryable. An answer that has begun is resumed (tandem_client/resuming.py):
after the loss of its router, and once it has tokens after every retryable failure. The attempts are counted since the
last new token. The pause doubles from try to try, is drawn at random (many clients must not retry together), and is
never shorter than the hint of the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tandem_client.errors import CallFailed
from tandem_client.resuming import Answer
from tandem_client.stubs.inference_pb2 import GenerateRequest, GenerateResponse

T = TypeVar("T")

HINT_SPREAD = 0.25  # a pause that the router asked for gets up to this share longer, at random


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 5  # 1 = no retries
    first_pause_s: float = 0.05
    max_pause_s: float = 2.0  # a longer hint of the router is honoured

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.first_pause_s < 0 or self.max_pause_s < self.first_pause_s:
            raise ValueError(f"max_attempts must be at least 1, and pauses in [0, max_pause_s]: {self}")

    def pause_s(self, error: CallFailed, num_attempts: int, remaining_s: float, draw: float) -> float | None:
        """Seconds until the next attempt; None = give up, with this error.

        `num_attempts` have failed, the last one with `error`. `draw` is a random number in [0, 1).
        """
        if not error.retryable or num_attempts >= self.max_attempts:
            return None
        longest = min(self.max_pause_s, self.first_pause_s * 2.0 ** min(num_attempts - 1, 30))
        pause = longest * (0.5 + 0.5 * draw)
        if error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s * (1.0 + HINT_SPREAD * draw))
        return pause if pause < remaining_s else None


NO_RETRY = RetryPolicy(max_attempts=1)
RESUME = RetryPolicy(max_attempts=10)  # the only router of an address is back within some seconds

AttemptStream = Callable[[GenerateRequest, float], AsyncGenerator[GenerateResponse, None]]


class Clock(Protocol):
    """Time and chance, for tests to replace."""

    def now(self) -> float:
        """Seconds, never going back."""

    async def sleep(self, seconds: float) -> None:
        """The clock of a `Client` blocks here and never suspends."""

    def draw(self) -> float:
        """A random number in [0, 1)."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def draw(self) -> float:
        return random.random()


SYSTEM_CLOCK = SystemClock()


class _Attempts:
    """The attempts at one call, all inside its time limit."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._deadline, self._num_failed = clock.now() + timeout_s, 0

    @property
    def left_s(self) -> float:
        return self._deadline - self._clock.now()

    def progress(self) -> None:
        """The newest attempt has brought a token."""
        self._num_failed = 0

    def pause_after(self, error: CallFailed, policy: RetryPolicy) -> float:
        """The seconds to wait before the next attempt. Raises `error` if there is none."""
        self._num_failed += 1
        pause_s = policy.pause_s(error, self._num_failed, self.left_s, self._clock.draw())
        if pause_s is None:
            raise error
        return pause_s


class Retrying:
    """Makes calls again. Each function that is given makes one attempt within so many seconds."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    async def answer(self, attempt: Callable[[float], Awaitable[T]], timeout_s: float, policy: RetryPolicy) -> T:
        attempts = _Attempts(self._clock, timeout_s)
        while True:
            try:
                return await attempt(attempts.left_s)
            except CallFailed as error:
                pause_s = attempts.pause_after(error, policy)
            await self._clock.sleep(pause_s)

    async def stream(
        self,
        request: GenerateRequest,
        attempt: AttemptStream,
        timeout_s: float,
        begin: Callable[[CallFailed], RetryPolicy],
        resume: RetryPolicy,
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The messages of one answer. `begin` gives the policy for the failure of a call that has brought no token."""
        answer, attempts = Answer(request), _Attempts(self._clock, timeout_s)
        while not answer.has_ended:
            num_tokens = answer.num_tokens
            try:
                async with contextlib.aclosing(attempt(answer.next_request(), attempts.left_s)) as responses:
                    async for response in responses:
                        new = answer.take(response)
                        if answer.num_tokens > num_tokens:
                            attempts.progress()
                        if new is not None:
                            yield new
                if not answer.call_has_ended:
                    return  # the caller finds no result
            except CallFailed as error:
                if answer.has_ended:
                    return
                if answer.can_resume and (answer.num_tokens or error.lost):
                    pause_s = attempts.pause_after(error, resume)
                elif answer.num_tokens:
                    raise
                else:
                    pause_s = attempts.pause_after(error, begin(error))
                await self._clock.sleep(pause_s)
