"""Checks the chat of a client and puts it into the form of chat templates (`text/chat.py`).

Every error names its field. Lengths are checked before texts are parsed as JSON.
"""

from __future__ import annotations

import re
from typing import Any

from core.errors import InvalidRequest, quoted
from router.serving.client_json import json_object
from tandem_client.stubs import inference_pb2
from text.chat import Chat
from text.tokenizer import ModelTokenizer

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHAT_MESSAGES = 1024
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # of one message
MAX_CALL_ID_CHARS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_ARGUMENTS = {"type": "object", "properties": {}}


def check_chat(wire: inference_pb2.ChatPrompt, tokenizer: ModelTokenizer, max_chars: int) -> Chat:
    """Raises `InvalidRequest`. A model without chat template refuses the result."""
    if not 1 <= len(wire.messages) <= MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat.messages", f"must have 1 to {MAX_CHAT_MESSAGES} messages, has {len(wire.messages)}")
    if len(wire.tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"must have at most {MAX_TOOLS} tools, has {len(wire.tools)}")
    num_chars = sum(map(_num_chars, wire.messages)) + sum(
        len(tool.description) + len(tool.parameters_json) for tool in wire.tools
    )
    if num_chars > max_chars:
        field = "chat" if wire.tools else "chat.messages"
        raise InvalidRequest(field, f"must have at most {max_chars} characters in all, has {num_chars}")
    if wire.tools and tokenizer.has_chat_template and not tokenizer.knows_tools:
        raise InvalidRequest("chat.tools", "the chat template of this model does not know tools")
    names: dict[str, str] = {}  # of the called tools, by the id of the call
    messages = []
    for position, message in enumerate(wire.messages):
        field = f"chat.messages[{position}]"
        _check_role(field, message, tokenizer)
        messages.append(_to_message(field, message, names))
    return Chat(messages, _check_tools(wire), _check_options(wire.template_options_json, tokenizer))


# ---- messages


def _num_chars(message: inference_pb2.ChatMessage) -> int:
    return len(message.content) + sum(len(call.arguments_json) for call in message.tool_calls)


def _check_role(field: str, message: inference_pb2.ChatMessage, tokenizer: ModelTokenizer) -> None:
    """The order of the roles is left to the template, which refuses an order that its model does not know."""
    role = message.role
    if role not in CHAT_ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(CHAT_ROLES)}, is {quoted(role)}")
    if message.tool_calls and role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls", f"only the assistant makes calls, the role is {quoted(role)}")
    if message.tool_call_id and role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", f"only for the role 'tool', the role is {quoted(role)}")
    if (message.tool_calls or role == "tool") and tokenizer.has_chat_template and not tokenizer.knows_tools:
        at = f"{field}.role" if role == "tool" else f"{field}.tool_calls"
        raise InvalidRequest(at, "the chat template of this model does not know tools")


def _to_message(field: str, message: inference_pb2.ChatMessage, names: dict[str, str]) -> dict[str, Any]:
    """`names` has the called tools of the messages before, and gets those of this one."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(
            f"{field}.tool_calls", f"must have at most {MAX_TOOL_CALLS} calls, has {len(message.tool_calls)}"
        )
    calls = []
    for index, call in enumerate(message.tool_calls):
        at = f"{field}.tool_calls[{index}]"
        if not 1 <= len(call.id) <= MAX_CALL_ID_CHARS:
            raise InvalidRequest(f"{at}.id", f"must have 1 to {MAX_CALL_ID_CHARS} characters, has {len(call.id)}")
        _check_name(f"{at}.name", call.name)
        arguments = json_object(f"{at}.arguments_json", call.arguments_json)
        calls.append({"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}})
        names[call.id] = call.name
    if calls:  # a template may test whether the key is there
        rendered["tool_calls"] = calls
    if message.role == "tool":
        if message.tool_call_id not in names:
            raise InvalidRequest(
                f"{field}.tool_call_id",
                f"must be the id of a call in a message before, is {quoted(message.tool_call_id)}",
            )
        rendered |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
    return rendered


# ---- tools and options


def _check_tools(wire: inference_pb2.ChatPrompt) -> list[dict[str, Any]]:
    tools, names = [], set()
    for index, tool in enumerate(wire.tools):
        field = f"chat.tools[{index}]"
        _check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise InvalidRequest(f"{field}.name", f"must be unique, {quoted(tool.name)} is there twice")
        names.add(tool.name)
        parameters = json_object(f"{field}.parameters_json", tool.parameters_json) or NO_ARGUMENTS
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _check_options(text: str, tokenizer: ModelTokenizer) -> dict[str, Any]:
    field = "chat.template_options_json"
    options = json_object(field, text)
    taken = sorted(options.keys() & tokenizer.reserved_options)
    if taken:
        raise InvalidRequest(field, f"must not set {', '.join(taken)}")
    for name in options:
        if not name.isidentifier():
            raise InvalidRequest(field, f"must have names of variables as keys, has {quoted(name)}")
    return options


def _check_name(field: str, name: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        raise InvalidRequest(field, f"must have 1 to 64 letters, digits, '_' and '-', is {quoted(name)}")
