"""What a worker does with the grammar of a new sequence, before the sequence reaches the machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from core.errors import InvalidRequest

# Compiles a grammar without blocking the event loop. Raises `InvalidRequest`.
GrammarCheck = Callable[[str], Awaitable[None]]


async def refuse_grammars(_: str) -> NoReturn:
    raise InvalidRequest(
        "output_format", "the GPU engine of this worker cannot force a format; workers with `--engine vllm` can"
    )


async def accept_grammars(_: str) -> None:
    """For an engine that reads grammars in a process of its own. The router has checked this one."""
