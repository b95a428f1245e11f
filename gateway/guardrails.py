"""Guardrails: code of the operator that sees each prompt before the model does, and each output before the client does.

    gateway starts    load_guardrail("module:function")           one Guardrail for each process with HTTP
    request arrives   check_prompt(guardrail, messages)           unchanged, rewritten, or `Refused`: status 400
    part begins       GuardedOutput(guardrail, messages)          one OutputGuardrail for each part of an output
    chunk arrives     await output.push(text)                     the text that goes to the client now, or `Refused`
    part ends         await output.finish()                       the text that was held back, or `Refused`

An output without calls of tools is one part; gateway/routes/guarded_choice.py divides the others.

A guardrail that raises anything but `Refused`, takes longer than `GUARDRAIL_TIMEOUT_S`, or returns a value of another
shape, refuses the request: without an answer of the guardrail, nothing passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from core.errors import ConfigError
from runtime.named_function import load_function

logger = logging.getLogger(__name__)

GUARDRAIL_TIMEOUT_S = 10.0  # one call of a guardrail; beyond: the request is refused
FAILED = "the guardrail of this server failed, so the request is refused"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """One text of a prompt: the content of a message, a part of a call in it or of a tool, or a whole text prompt."""

    role: str  # of the message; "tools", "template_options"; empty: a text prompt
    text: str


class Refused(Exception):
    """The guardrail refuses. Clients read the message.

    A refused prompt ends with the error code "content_policy_violation", a refused output with the finish reason
    "content_filter".
    """


class OutputGuardrail(Protocol):
    """Sees one part of the output of a choice: all of its text, or the text between two calls of tools, or the name or
    the arguments of a call. The object lives as long as the part, and may remember the text so far."""

    async def push(self, text: str, /) -> str:
        """The text to send now. It may lack an end that depends on later text. Raises `Refused`."""

    async def finish(self) -> str:
        """The text still held back. The part has ended. Raises `Refused`."""


class Guardrail(Protocol):
    async def check_prompt(self, messages: Sequence[Message], /) -> Sequence[Message]:
        """The messages for the model: as many as given, with the same roles. Raises `Refused`."""

    def open_output(self, messages: Sequence[Message], /) -> OutputGuardrail:
        """The guardrail of one part. `messages`: what `check_prompt` returned."""


def load_guardrail(name: str) -> Guardrail | None:
    """Call the function that "module:function" names; empty = None. Raises `ConfigError`."""
    if not name:
        return None
    guardrail: Any = load_function("[gateway] guardrail", name)()
    if not callable(getattr(guardrail, "check_prompt", None)) or not callable(getattr(guardrail, "open_output", None)):
        raise ConfigError(f"[gateway] guardrail: {name} must return an object with check_prompt and open_output")
    made: Guardrail = guardrail
    return made


async def check_prompt(guardrail: Guardrail | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages for the model. Raises `Refused`."""
    if guardrail is None:
        return tuple(messages)
    checked = tuple(await _answer(lambda: guardrail.check_prompt(messages), (list, tuple)))
    if [getattr(message, "role", None) for message in checked] != [message.role for message in messages]:
        logger.error("the guardrail returned messages of other roles than it was given")
        raise Refused(FAILED)
    if not all(isinstance(getattr(message, "text", None), str) for message in checked):
        logger.error("the guardrail returned a message without a text")
        raise Refused(FAILED)
    return checked


class GuardedOutput:
    """One part of an output on its way through the guardrail; without a guardrail, text passes unchanged."""

    def __init__(self, guardrail: Guardrail | None, messages: Sequence[Message]) -> None:
        """Raises `Refused`."""
        self._output: OutputGuardrail | None = None
        if guardrail is not None:
            try:
                self._output = guardrail.open_output(messages)
            except Refused:
                raise
            except Exception as error:
                logger.exception("the guardrail failed")
                raise Refused(FAILED) from error

    async def push(self, text: str) -> str:
        """The text to send now. Raises `Refused`."""
        output = self._output
        return text if output is None or not text else await _answer(lambda: output.push(text), str)

    async def finish(self) -> str:
        """The text still held back. Raises `Refused`."""
        output = self._output
        return "" if output is None else await _answer(lambda: output.finish(), str)


async def _answer(call: Callable[[], Awaitable[T]], kind: type | tuple[type, ...]) -> T:
    """The answer of a guardrail. Raises `Refused`, also if the guardrail fails. A method that is missing, or takes
    other arguments, fails at its call."""
    try:
        async with asyncio.timeout(GUARDRAIL_TIMEOUT_S):
            answer = await call()
    except Refused:
        raise
    except Exception as error:
        logger.exception("the guardrail failed")
        raise Refused(FAILED) from error
    if not isinstance(answer, kind):
        logger.error("the guardrail returned a %s", type(answer).__name__)
        raise Refused(FAILED)
    return answer
