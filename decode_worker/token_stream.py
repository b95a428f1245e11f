"""`TokenStreamWriter` sends the tokens of all calls of one router, as one message of columns for each step.

    add, add, ... --> columns --take--> one StepTokens message --write--> router

While a write waits because the router reads slowly, the tokens of later steps join into the next message. The
stream of a router that reads nothing ends after `MAX_WRITE_S`, or earlier with more than `MAX_PENDING` entries. So a
slow router costs a bounded amount of memory and delays no other router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from core.errors import TandemError, WorkerUnavailable
from core.step import SampledToken
from protos import codec
from tandem_client.stubs import worker_pb2

# Limit: tokens that wait for one router, with log-probabilities; beyond: its stream and calls end; it retries
MAX_PENDING = 262_144
MAX_WRITE_S = 10.0  # a write to a router that does not read; beyond: its stream and calls end; it retries

Write = Callable[[worker_pb2.StepTokens], Awaitable[None]]


class TokenStreamWriter:
    """One StreamTokens call of a router. Use it on one event loop."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._has_tokens = asyncio.Event()
        self._write_limit: asyncio.Timeout | None = None  # of the write in progress
        self._error: TandemError | None = None  # ends the stream after the queued tokens
        self._clear()

    def _clear(self) -> None:
        self._calls: list[int] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self._logprob_places: list[int] = []
        self._logprobs: list[SampledToken] = []
        self._notices: list[worker_pb2.MoveNotice] = []
        self._room = MAX_PENDING

    def add(self, call: int, index: int, token: SampledToken) -> None:
        """Queue one token for the next message. A token beyond MAX_PENDING ends the stream."""
        if self._room <= 0:
            self._overflow()
            return
        if token.logprob is not None:
            self._logprob_places.append(len(self._calls))
            self._logprobs.append(token)
            self._room -= len(token.top_logprobs)
        self._calls.append(call)
        self._indexes.append(index)
        self._token_ids.append(token.token_id)
        self._room -= 1
        self._has_tokens.set()

    def add_notice(self, notice: worker_pb2.MoveNotice) -> None:
        """Queue it for the next message, behind the tokens."""
        self._notices.append(notice)
        self._room -= 1
        if self._room <= 0:
            self._overflow()
        self._has_tokens.set()

    def end(self, error: TandemError) -> None:
        """Write the queued tokens, then end the stream with `error`."""
        self._error = error
        self._has_tokens.set()

    def _overflow(self) -> None:
        self._clear()
        self._room = 0
        self.end(self._too_slow())
        if self._write_limit is not None and not self._write_limit.expired():
            self._write_limit.reschedule(asyncio.get_running_loop().time())

    def _too_slow(self) -> WorkerUnavailable:
        return WorkerUnavailable(f"the router {self.router_id} reads its tokens too slowly")

    def take(self) -> worker_pb2.StepTokens:
        """All queued tokens as one message."""
        message = worker_pb2.StepTokens(
            calls=self._calls,
            indexes=self._indexes,
            token_ids=self._token_ids,
            logprob_places=self._logprob_places,
            logprobs=map(codec.encode_logprobs, self._logprobs),
            moves=self._notices,
        )
        self._clear()
        return message

    @property
    def _has_news(self) -> bool:
        return bool(self._calls or self._notices)

    async def write_all(self, write: Write) -> NoReturn:
        """Write until the call is cancelled. Raises the error of `end`, or `WorkerUnavailable` if the router reads too
        slowly."""
        await self._write(write, worker_pb2.StepTokens())  # says that the stream is open
        while self._error is None or self._has_news:
            await self._has_tokens.wait()
            self._has_tokens.clear()
            if self._has_news:
                await self._write(write, self.take())
        raise self._error

    async def _write(self, write: Write, message: worker_pb2.StepTokens) -> None:
        try:
            async with asyncio.timeout(MAX_WRITE_S) as self._write_limit:
                await write(message)
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._write_limit = None
