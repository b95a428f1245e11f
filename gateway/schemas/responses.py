"""The body of /v1/responses in its text form, and its input as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from core.errors import quoted
from gateway.errors import invalid, refused
from gateway.schemas.base import Schema, items
from gateway.schemas.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Content,
    FunctionSpec,
    Role,
    text_of,
)
from gateway.schemas.fields import ITEM, TOOL, check_extra
from gateway.schemas.output_format import response_format
from gateway.schemas.sampling import Count, GenerationFields
from tandem_client.stubs.inference_pb2 import ChatMessage, OutputFormat, ToolCall

MAX_METADATA = 16  # as OpenAI's; every event with a response repeats them
MAX_FORMAT_NAME_CHARS = 64  # characters of `text.format.name` of a response, as OpenAI's; beyond: status 400
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
# Type of an item -> texts of other types. Without them, the model would answer another prompt.
UNUSED_TEXTS = {
    "message": ("arguments", "output"),
    "function_call": ("content", "output"),
    "function_call_output": ("content", "arguments"),
}


class InputItem(Schema):
    """A message, a call of a tool, or the output of a tool. Clients send earlier output items back unchanged."""

    type: str | None = None  # of a message
    role: Role | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None

    @property
    def kind(self) -> str:
        return self.type or "message"


class TextFormat(Schema):
    type: str | None = None
    name: Annotated[str, Field(max_length=MAX_FORMAT_NAME_CHARS)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Schema):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(FunctionSpec):
    type: str


class ResponsesBody(GenerationFields):
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], items(MAX_MESSAGES, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], items(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], items(MAX_METADATA)] | None = None


def input_messages(body: ResponsesBody) -> tuple[list[ChatMessage], list[str]]:
    """The chat that `instructions` and `input` describe, and warnings. Raises `ApiError` with the path of the field."""
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)], []
    warnings = []
    for index, item in enumerate(body.input):
        path, kind = f"input[{index}]", item.kind
        if kind not in ITEM_TYPES:
            raise refused(f"{path}.type", f"items of type {quoted(kind)} are not supported", "unsupported_parameter")
        if kind == "reasoning":
            warnings.append(f"{path} has no effect: earlier reasoning is left out")
            continue
        check_extra(item.model_extra, ITEM, f"{path}.")
        for name in UNUSED_TEXTS[kind]:
            if getattr(item, name):
                raise refused(f"{path}.{name}", f"belongs to no item of type {kind}", "unsupported_parameter")
        match kind:
            case "message":
                messages.append(_message(item, path))
            case "function_call":
                call = ToolCall(
                    id=_required(item.call_id, f"{path}.call_id"),
                    name=_required(item.name, f"{path}.name"),
                    arguments_json=item.arguments or "{}",
                )
                if messages and messages[-1].role == "assistant":  # the calls of one turn belong to one message
                    messages[-1].tool_calls.append(call)
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            case "function_call_output":
                call_id = _required(item.call_id, f"{path}.call_id")
                text = text_of(item.output, f"{path}.output")
                messages.append(ChatMessage(role="tool", content=text, tool_call_id=call_id))
            case _:
                raise AssertionError(kind)
    return messages, warnings


def field_names(body: ResponsesBody) -> dict[str, str]:
    """The names of this request for the fields of the chat that `input_messages` makes of it."""
    has_format = body.text is not None and _echoed_format(body)["type"] != "text"
    names = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "output_format": "text.format" if has_format else "tools",
    }
    names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(body.tools or ()))}
    position, num_calls, is_assistant = -1, 0, False
    if body.instructions:
        position = 0
        names |= {"messages[0]": "instructions", "messages[0].content": "instructions"}
    if isinstance(body.input, str):
        return names | {f"messages[{position + 1}]": "input", f"messages[{position + 1}].content": "input"}
    for index, item in enumerate(body.input):
        if item.kind == "reasoning":  # becomes no message
            continue
        is_call = item.kind == "function_call"
        if not is_call or not is_assistant:
            position, num_calls = position + 1, 0
            names[f"messages[{position}]"] = f"input[{index}]"
            names[f"messages[{position}].tool_call_id"] = f"input[{index}].call_id"
        is_assistant = is_call or (item.kind == "message" and item.role == "assistant")
        if is_call:
            call = f"messages[{position}].tool_calls[{num_calls}]"
            names |= {f"{call}.function": f"input[{index}]", f"{call}.id": f"input[{index}].call_id"}
            num_calls += 1
    return names


def _message(item: InputItem, path: str) -> ChatMessage:
    role = _required(item.role, f"{path}.role")
    if role == "tool":
        raise refused(f"{path}.role", "send the output of a tool as an item of type function_call_output")
    if item.content is None:
        raise refused(f"{path}.content", "is required", "missing_required_parameter")
    return ChatMessage(role=role, content=text_of(item.content, f"{path}.content"))


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise refused(path, "is required", "missing_required_parameter")
    return value


def response_tools(body: ResponsesBody) -> list[ResponseTool]:
    """The tools that the model may call. Empty if `tool_choice` is "none". Raises `ApiError`."""
    if body.tool_choice == "none":
        return []
    tools = []
    for index, given in enumerate(body.tools or ()):
        path = f"tools[{index}]"
        if given.get("type") != "function":
            message = f"only tools of type 'function' are supported, one is {quoted(str(given.get('type')))}"
            raise refused(f"{path}.type", message, "unsupported_parameter")
        try:
            tool = ResponseTool.model_validate(given)
        except ValidationError as error:
            raise invalid(error, "tools", index) from None
        check_extra(tool.model_extra, TOOL, f"{path}.")
        tools.append(tool)
    return tools


def text_format(body: ResponsesBody) -> tuple[OutputFormat | None, list[str]]:
    """The form of the output, and warnings. Raises `ApiError` for an unknown form."""
    options = body.text
    if options is None:
        return None, []
    check_extra(options.model_extra, {}, "text.")
    warnings = ["text.verbosity has no effect: the models here have no such switch"] if options.verbosity else []
    form = options.format
    if form is None:
        return None, warnings
    check_extra(form.model_extra, {}, "text.format.")
    return response_format(form.type or "text", form.schema_, "text.format", "text.format.schema"), warnings


def echoed_fields(body: ResponsesBody, tools: Sequence[ResponseTool]) -> dict[str, Any]:
    """The fields of the request that every response object repeats.

    A schema or the router bounds each. So only the used fields of a tool and of the format are repeated.
    """
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,  # null: the default of the model
        "top_p": body.top_p,
        "tools": [_echoed_tool(tool) for tool in tools],
        "tool_choice": _echoed_choice(body.tool_choice or "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": _echoed_format(body)},
        "truncation": "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _echoed_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """`wire_choice` has found the name."""
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.get("function", choice)["name"]}


def _echoed_format(body: ResponsesBody) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None or form.type is None else form.type}
    return _given(type=form.type, name=form.name, schema=form.schema_, strict=form.strict)


def _echoed_tool(tool: ResponseTool) -> dict[str, Any]:
    return _given(
        type=tool.type,
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
