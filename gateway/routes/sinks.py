"""Sinks between the calls of a request and its answer: one renumbers choices, one applies the guardrail.

call of prompt 0 --> Renumbered(first choice 0) --.
call of prompt 1 --> Renumbered(first choice n) --+--> GuardedSink --> the form of the answer
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.errors import ApiError
from gateway.guardrails import Guardrail, Message, Refused
from gateway.router_calls import Chunk, Sink
from gateway.routes.guarded_choice import GuardedChoice
from tandem_client.stubs.inference_pb2 import Finished

MAX_UNCHECKED_PARTS = 16  # parts of an answer before the guardrail; beyond: tokens stay in the router


class AnswerSink(Sink, Protocol):
    """A sink whose choices a guardrail may end."""

    def filtered(self, choice: int, /) -> None:
        """The guardrail ended `choice`."""


@dataclass(slots=True)
class Renumbered:
    """A sink for one of several calls: its choice 0 is choice `first_choice` of the answer."""

    sink: Sink
    first_choice: int

    @property
    def is_full(self) -> bool:
        return self.sink.is_full

    def when_room(self, callback: Callable[[], None]) -> None:
        self.sink.when_room(callback)

    def chunk(self, chunk: Chunk) -> None:
        chunk.choice += self.first_choice
        self.sink.chunk(chunk)

    def finished(self, finished: Finished) -> None:
        finished.choice += self.first_choice
        self.sink.finished(finished)


class GuardedSink:
    """Passes every part through the guardrail before `sink` gets it.

    A choice that the guardrail refuses ends with `filtered`. Once no choice is left, the calls are cancelled.
    """

    def __init__(
        self, sink: AnswerSink, guardrail: Guardrail, prompts: Sequence[Sequence[Message]], num_choices: int
    ) -> None:
        """`num_choices`: of each prompt. Raises `ApiError` if the guardrail refuses before the first text."""
        try:
            self._choices = [GuardedChoice(guardrail, prompt) for prompt in prompts for _ in range(num_choices)]
        except Refused as error:
            raise ApiError(400, str(error), code="content_policy_violation") from None
        self._sink = sink
        self._running = set(range(len(self._choices)))
        self._unchecked: deque[Chunk | Finished] = deque()
        self._changed = asyncio.Event()
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        return len(self._unchecked) >= MAX_UNCHECKED_PARTS or self._sink.is_full

    def when_room(self, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)
        self._changed.set()

    def chunk(self, chunk: Chunk) -> None:
        self._unchecked.append(chunk)
        self._changed.set()

    def finished(self, finished: Finished) -> None:
        self._unchecked.append(finished)
        self._changed.set()

    async def check_all(self, calls: Coroutine[Any, Any, None]) -> None:
        """Run `calls`, which fill this sink, and pass on what the guardrail lets through. Raises their error."""
        generating = asyncio.create_task(calls)
        generating.add_done_callback(lambda _: self._changed.set())
        try:
            while self._running and not (generating.done() and not self._unchecked):
                await self._changed.wait()
                self._changed.clear()
                while self._unchecked and self._running:
                    await self._check(self._unchecked.popleft())
                await self._resume_writers()
            if self._running:
                await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _resume_writers(self) -> None:
        if not self._waiting:
            return
        if self._sink.is_full:
            room = asyncio.Event()
            self._sink.when_room(room.set)
            await room.wait()
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    async def _check(self, part: Chunk | Finished) -> None:
        choice = part.choice
        if choice not in self._running:
            return
        try:
            if isinstance(part, Finished):
                held_back = await self._choices[choice].finish(choice)
                if held_back.text or held_back.tool_calls:
                    self._sink.chunk(held_back)
                self._running.discard(choice)
                self._sink.finished(part)
            else:
                self._sink.chunk(await self._choices[choice].push(part))
        except Refused:
            self._running.discard(choice)
            self._sink.filtered(choice)
