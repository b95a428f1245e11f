"""A worker checks each new sequence before its machine gets the sequence. The router may be faulty: a token id outside
the vocabulary would fail a step, and with it every sequence of the step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from core.errors import InvalidRequest
from core.request import Request

# Compiles a grammar without blocking the event loop. Raises `InvalidRequest`.
GrammarCheck = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """`vocab_size`, `context_length`: of the engine's model."""

    vocab_size: int
    context_length: int
    check_grammar: GrammarCheck

    async def __call__(self, request: Request) -> None:
        """Raises `InvalidRequest`."""
        request.validate_for(self.vocab_size, self.context_length)
        if request.sampling.grammar:
            await self.check_grammar(request.sampling.grammar)


async def refuse_grammars(_: str) -> NoReturn:
    raise InvalidRequest(
        "output_format", "the GPU engine of this worker cannot force a format; workers with `--engine vllm` can"
    )


async def accept_grammars(_: str) -> None:
    """For an engine that reads grammars in a process of its own. The router has checked this one."""
