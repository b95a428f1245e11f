"""The body of /v1/chat/completions, and its messages and tools as the gRPC API carries them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from core.errors import quoted
from gateway.errors import refused
from gateway.schemas.base import Schema, items
from gateway.schemas.fields import CALL, MESSAGE, PART, TOOL, check_extra
from gateway.schemas.sampling import Count, SamplingFields
from tandem_client.stubs.inference_pb2 import ChatMessage, Tool, ToolCall, ToolChoice

MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_PARTS = 1024  # of one message
MAX_TOOL_CALLS = 128  # of one message
TEXT_PARTS = ("text", "input_text", "output_text")

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(Schema):
    type: str
    text: str | None = None


Content = str | Annotated[list[ContentPart], items(MAX_PARTS)]


class FunctionCall(Schema):
    name: str
    arguments: str | None = None


class MessageToolCall(Schema):
    id: str
    type: str | None = None
    function: FunctionCall


class Message(Schema):
    role: Role
    content: Content | None = None
    tool_calls: Annotated[list[MessageToolCall], items(MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Schema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Schema):
    type: str
    function: FunctionSpec | None = None


class ChatBody(SamplingFields):
    messages: Annotated[list[Message], items(MAX_MESSAGES, min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolSpec], items(MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def num_logprobs(body: ChatBody) -> int | None:
    """The number of most likely tokens for each token; None = no log-probabilities."""
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs to be true")
    return (body.top_logprobs or 0) if body.logprobs else None


def text_of(content: str | list[ContentPart] | None, path: str) -> str:
    """The text of all parts. Raises `ApiError` for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if part.type not in TEXT_PARTS:
            message = f"parts of type {quoted(part.type)} are not supported: the models here read text only"
            raise refused(f"{where}.type", message, "unsupported_content_part")
        check_extra(part.model_extra, PART, f"{where}.")
        if part.text is None:
            raise refused(f"{where}.text", "is required", "missing_required_parameter")
    return "".join(part.text or "" for part in content)


def wire_messages(messages: list[Message]) -> tuple[list[ChatMessage], list[str]]:
    """The messages for the router, and warnings. Raises `ApiError` with the path of the field."""
    wire, warnings = [], []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        warnings += check_extra(message.model_extra, MESSAGE, f"{path}.")
        if message.content is None and message.role != "assistant":
            raise refused(f"{path}.content", "is required", "missing_required_parameter")
        if message.tool_calls and message.role != "assistant":
            raise refused(f"{path}.tool_calls", "only messages of the assistant have tool calls")
        if (message.tool_call_id is not None) != (message.role == "tool"):
            raise refused(f"{path}.tool_call_id", "is required for role tool, and for no other role")
        calls = [_wire_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls or ())]
        wire.append(
            ChatMessage(
                role=message.role,
                content=text_of(message.content, f"{path}.content"),
                tool_calls=calls,
                tool_call_id=message.tool_call_id or "",
            )
        )
    return wire, warnings


def _wire_call(call: MessageToolCall, path: str) -> ToolCall:
    _require_function(call.type or "function", f"{path}.type")
    check_extra(call.model_extra, CALL, f"{path}.")
    check_extra(call.function.model_extra, CALL, f"{path}.function.")
    return ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments or "{}")


def _require_function(kind: str, path: str) -> None:
    if kind != "function":
        raise refused(path, f"only tools of type 'function' are supported, one is {quoted(kind)}")


def wire_tools(specs: list[ToolSpec] | None, choice: str | dict[str, Any] | None) -> list[Tool]:
    """The tools that the model may call. Empty if `choice` is "none"."""
    if choice == "none":
        return []
    tools = []
    for index, tool in enumerate(specs or ()):
        path = f"tools[{index}]"
        _require_function(tool.type, f"{path}.type")
        if tool.function is None:
            raise refused(f"{path}.function", "is required", "missing_required_parameter")
        check_extra(tool.model_extra, TOOL, f"{path}.")
        check_extra(tool.function.model_extra, TOOL, f"{path}.function.")
        tools.append(wire_tool(tool.function))
    return tools


def wire_tool(function: FunctionSpec) -> Tool:
    parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return Tool(name=function.name, description=function.description or "", parameters_json=parameters)


def wire_choice(choice: str | dict[str, Any] | None, parallel: bool | None, has_tools: bool) -> ToolChoice | None:
    """How the model calls the tools; None = as it likes. Raises `ApiError`."""
    if choice in (None, "auto", "none"):
        return ToolChoice(single=True) if parallel is False and has_tools and choice != "none" else None
    if not has_tools:
        raise refused("tool_choice", "needs tools")
    name = ""
    if isinstance(choice, dict):
        function = choice.get("function", choice)  # of a chat; the choice of a response has the name itself
        name = function.get("name", "") if isinstance(function, dict) else ""
        if choice.get("type") != "function" or not isinstance(name, str) or not name:
            raise refused("tool_choice", 'must be none, auto, required, or {"type": "function", ...} with a name')
    elif choice != "required":
        raise refused("tool_choice", f"must be none, auto, required or a named function, is {quoted(choice)}")
    return ToolChoice(required=True, name=name, single=parallel is False)
