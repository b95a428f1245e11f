"""Applies the guardrail to the prompts of requests (gateway/outputs.py applies it to outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from gateway.errors import ApiError, refused
from gateway.guardrails import Guardrail, Message, Refused, check_prompt, load_guardrail
from tandem_client import ChatMessage


def guardrail_of(request: Request) -> Guardrail | None:
    """The guardrail of the application; the first call loads it. Raises `core.errors.ConfigError`."""
    state = request.app.state
    if not hasattr(state, "guardrail"):
        state.guardrail = load_guardrail(state.config.guardrail)
    guardrail: Guardrail | None = state.guardrail
    return guardrail


async def check_messages(guardrail: Guardrail | None, messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Rewrite `messages` as the guardrail wants them. Returns what it saw of them. Raises `ApiError`."""
    if guardrail is None:
        return ()
    checked = await _check(guardrail, [Message(message.role, message.content) for message in messages])
    for message, found in zip(messages, checked, strict=True):
        message.content = found.text
    return checked


async def check_text(guardrail: Guardrail, text: str) -> str:
    """The text for the model. Raises `ApiError`."""
    (checked,) = await _check(guardrail, [Message("", text)])
    return checked.text


async def _check(guardrail: Guardrail, messages: list[Message]) -> tuple[Message, ...]:
    try:
        return await check_prompt(guardrail, messages)
    except Refused as error:
        raise ApiError(400, str(error), code="content_policy_violation") from None


def refuse_logprobs(guardrail: Guardrail | None, value: Any) -> None:
    """Log-probabilities would show the tokens that a guardrail takes out. Raises `ApiError`."""
    if guardrail is not None and value is not None:
        raise refused("logprobs", "is not supported: a guardrail checks the output", "unsupported_parameter")
