"""Applies the guardrail to the prompts of requests (gateway/routes/guarded_choice.py applies it to outputs)."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from starlette.requests import Request

from gateway.errors import ApiError, refused
from gateway.guardrails import Guardrail, Message, Refused, check_prompt, load_guardrail
from tandem_client.stubs.inference_pb2 import ChatPrompt


def guardrail_of(request: Request) -> Guardrail | None:
    """The guardrail of the application; the first call loads it. Raises `core.errors.ConfigError`."""
    state = request.app.state
    if not hasattr(state, "guardrail"):
        state.guardrail = load_guardrail(state.config.guardrail)
    guardrail: Guardrail | None = state.guardrail
    return guardrail


async def check_chat(guardrail: Guardrail | None, chat: ChatPrompt) -> tuple[Message, ...]:
    """Rewrite `chat` as the guardrail wants it. Returns what it saw of the chat. Raises `ApiError`.

    The guardrail sees every text that the chat template may write into the prompt: options of the template, tools,
    contents of messages, and arguments of earlier calls.
    """
    if guardrail is None:
        return ()
    places: list[tuple[str, Any, str]] = [("template_options", chat, "template_options_json")]
    places += [("tools", tool, name) for tool in chat.tools for name in ("description", "parameters_json")]
    for message in chat.messages:
        places += [(message.role, call, "arguments_json") for call in message.tool_calls]
        places.append((message.role, message, "content"))
    places = [place for place in places if getattr(place[1], place[2])]
    for _, owner, name in places:
        if name.endswith("_json"):
            setattr(owner, name, _unescaped(getattr(owner, name)))
    checked = await _check(guardrail, [Message(role, getattr(owner, name)) for role, owner, name in places])
    for (_, owner, name), found in zip(places, checked, strict=True):
        setattr(owner, name, found.text)
    return checked


def _unescaped(text: str) -> str:
    """JSON as the model reads it: no character is hidden behind an escape such as \\u0061."""
    with contextlib.suppress(ValueError, RecursionError):  # the router refuses text that is no JSON
        return json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace").decode()
    return text


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
