"""Applies the guardrail to the prompts of requests (gateway/routes/guarded_choice.py applies it to outputs)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from gateway.errors import ApiError, refused
from gateway.guardrails import Guardrail, Message, Refused, check_prompt, load_guardrail
from tandem_client.stubs.inference_pb2 import ChatPrompt

VIOLATION = "content_policy_violation"
NAMES = ("name", "id", "tool_call_id")
# The router refuses every role but its own, and the choice of a tool that is not among the tools.
FIXED = ("tandem.v1.ChatMessage.role", "tandem.v1.ToolChoice.name")


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
    contents of messages, earlier calls, and the names and ids of both. A name or an id that it changes refuses the
    prompt: other parts of the request and the client refer to it.
    """
    if guardrail is None:
        return ()
    places = [*_texts(chat, "template_options")]
    for _, owner, name in places:
        if name.endswith("_json"):
            setattr(owner, name, _unescaped(getattr(owner, name)))
    checked = await _check(guardrail, [Message(role, getattr(owner, name)) for role, owner, name in places])
    for (_, owner, name), found in zip(places, checked, strict=True):
        if name in NAMES and getattr(owner, name) != found.text:
            raise ApiError(
                400, f"the guardrail does not allow the {name} {getattr(owner, name)[:64]!r}", code=VIOLATION
            )
        setattr(owner, name, found.text)
    return checked


def _texts(part: Any, role: str) -> Iterator[tuple[str, Any, str]]:
    """(role, message, field) of each text in `part`, at every depth: a new field of the schema is among them.

    What a message begins with is before its messages, and the content of a message is last.
    """
    for field in sorted(part.DESCRIPTOR.fields, key=lambda field: (field.name == "messages", field.name == "content")):
        value = getattr(part, field.name)
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _texts(inner, getattr(inner, "role", "tools" if field.name == "tools" else role))
        elif isinstance(value, str) and value and field.full_name not in FIXED:
            yield role, part, field.name


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
        raise ApiError(400, str(error), code=VIOLATION) from None


def refuse_logprobs(guardrail: Guardrail | None, value: Any) -> None:
    """Log-probabilities would show the tokens that a guardrail takes out. Raises `ApiError`."""
    if guardrail is not None and value is not None:
        raise refused("logprobs", "is not supported: a guardrail checks the output", "unsupported_parameter")
