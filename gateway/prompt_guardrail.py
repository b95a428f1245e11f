"""Applies the guardrail to the prompts of requests (gateway/routes/guarded_choice.py applies it to outputs)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from core.request import MAX_JSON_CHARS
from gateway.errors import ApiError, refused
from gateway.guardrails import Guardrail, Message, Refused, check_prompt
from gateway.schemas.json_size import check_texts
from tandem_client.stubs.inference_pb2 import ChatPrompt, GenerateRequest

VIOLATION = "content_policy_violation"
NAMES = ("name", "id", "tool_call_id")
# The router refuses every role but its own, and the choice of a tool that is not among the tools.
FIXED = ("tandem.v1.ChatMessage.role", "tandem.v1.ToolChoice.name")


@dataclass(frozen=True, slots=True)
class ChatText:
    """One text of a chat."""

    role: str
    path: str  # of the gRPC API
    owner: Any  # the message whose field it is
    name: str

    @property
    def text(self) -> str:
        text: str = getattr(self.owner, self.name)
        return text


def texts_of(chat: ChatPrompt) -> list[ChatText]:
    """Every text that the chat template may write into the prompt: options of the template, tools, contents of
    messages, earlier calls, and the names and ids of both. JSON becomes as the model reads it.

    Call it in a thread. Raises `InvalidRequest` and `ApiError` for more JSON than a request may have.
    """
    found = [*_texts(chat, "template_options", "chat")]
    json_texts = [each for each in found if each.name.endswith("_json")]
    for each in json_texts:  # the router would refuse it, but a guardrail may make it shorter
        if len(each.text) > MAX_JSON_CHARS:
            raise InvalidRequest(each.path, f"must have at most {MAX_JSON_CHARS} characters, has {len(each.text)}")
    check_texts("body", [each.text.encode() for each in json_texts])
    for each in json_texts:
        setattr(each.owner, each.name, _unescaped(each.text))
    return found


async def check_chat(guardrail: Guardrail, texts: Sequence[ChatText]) -> tuple[Message, ...]:
    """Rewrite the texts of a chat as the guardrail wants them. Returns what it saw of the chat. Raises `ApiError`.

    A name or an id that it changes refuses the prompt: other parts of the request and the client refer to it.
    """
    checked = await _check(guardrail, [Message(each.role, each.text) for each in texts])
    for each, found in zip(texts, checked, strict=True):
        if each.name in NAMES and each.text != found.text:
            raise ApiError(400, f"the guardrail does not allow the {each.name} {each.text[:64]!r}", code=VIOLATION)
        setattr(each.owner, each.name, found.text)
    return checked


def _texts(part: Any, role: str, path: str) -> Iterator[ChatText]:
    """Each text in `part`, at every depth: a new field of the schema is among them.

    What a message begins with is before its messages, and the content of a message is last.
    """
    for field in sorted(part.DESCRIPTOR.fields, key=lambda field: (field.name == "messages", field.name == "content")):
        value, at = getattr(part, field.name), f"{path}.{field.name}"
        if field.message_type is not None:
            parts = {f"{at}[{index}]": each for index, each in enumerate(value)} if field.is_repeated else {at: value}
            for place, inner in parts.items():
                yield from _texts(inner, getattr(inner, "role", "tools" if field.name == "tools" else role), place)
        elif isinstance(value, str) and value and field.full_name not in FIXED:
            yield ChatText(role, at, part, field.name)


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


def refuse_tokens(guardrail: Guardrail | None, wire: GenerateRequest) -> None:
    """Log-probabilities and token ids would show the tokens that a guardrail takes out. Raises `ApiError`."""
    for field, is_set in (("logprobs", wire.HasField("logprobs")), ("return_token_ids", wire.return_prompt_token_ids)):
        if guardrail is not None and is_set:
            raise refused(field, "is not supported: a guardrail checks the output", "unsupported_parameter")
