"""A `GenerateRequest` from a prompt and keyword arguments. protos/inference.proto gives the range of each option."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, cast

from tandem_client.results import ToolCall
from tandem_client.stubs import inference_pb2

# Text without a chat template; messages for the chat template; or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[inference_pb2.ChatMessage] | Sequence[int]


class Options(TypedDict, total=False):
    """The options of `stream` and `complete`."""

    model: str
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    logprobs: int
    cache_salt: str
    priority: int
    request_id: str
    user: str
    speculation: bool
    output_format: Mapping[str, Any] | inference_pb2.OutputFormat  # e.g. {"json_schema": {...}}, {"choices": ["a"]}
    # Only with messages, e.g. {"name": "f", "description": "...", "parameters": {...}}: a JSON Schema, or its text
    tools: Sequence[Mapping[str, Any] | inference_pb2.Tool]
    tool_choice: Mapping[str, Any] | inference_pb2.ToolChoice  # e.g. {"required": True}, {"name": "f"}


_STOP = {name: name for name in ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")} | {"stop": "stop_strings"}
_SAMPLING = {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}


def build_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Raises `TypeError` for an unknown option or a value of the wrong type."""
    unknown = set(options) - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"{sorted(unknown)[0]!r} is not an option; known: {', '.join(Options.__annotations__)}")
    values = dict(options)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    stop = {_STOP[name]: values.pop(name) for name in _STOP if name in values}
    sampling = {name: values.pop(name) for name in _SAMPLING if name in values}
    if "output_format" in values:
        values["output_format"] = _output_format(values["output_format"])
    chat = {name: values.pop(name) for name in ("tools", "tool_choice") if name in values}
    request = inference_pb2.GenerateRequest(
        stop=inference_pb2.StopConditions(**stop), sampling=inference_pb2.SamplingParams(**sampling), **values
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], int):
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))
    else:
        messages = cast("Sequence[Mapping[str, Any] | inference_pb2.ChatMessage]", prompt)
        request.chat.messages.extend(map(_message, messages))
        _add_tools(request.chat, **chat)
    if chat and not request.HasField("chat"):
        raise TypeError(f"{next(iter(chat))!r} needs messages as the prompt")
    return request


def _message(message: Mapping[str, Any] | inference_pb2.ChatMessage) -> inference_pb2.ChatMessage:
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    values = dict(message)
    if "tool_calls" in values:
        values["tool_calls"] = list(map(_call, values["tool_calls"]))
    try:
        return inference_pb2.ChatMessage(**values)
    except ValueError as error:  # of protobuf, for a field that a message does not have
        raise TypeError(f"a message has role and content, this one has {', '.join(message)}") from error


def _call(call: Any) -> Any:
    """Of an earlier answer; protobuf takes or refuses what is no `ToolCall`."""
    return inference_pb2.ToolCall(**asdict(call)) if isinstance(call, ToolCall) else call


def _add_tools(
    chat: inference_pb2.ChatPrompt,
    tools: Sequence[Mapping[str, Any] | inference_pb2.Tool] = (),
    tool_choice: Mapping[str, Any] | inference_pb2.ToolChoice | None = None,
) -> None:
    chat.tools.extend(map(_tool, tools))
    if isinstance(tool_choice, Mapping):
        try:
            tool_choice = inference_pb2.ToolChoice(**tool_choice)
        except ValueError as error:  # of protobuf, for a field that does not exist
            raise TypeError(f"a tool choice has required, name and single: {error}") from error
    if tool_choice is not None:
        chat.tool_choice.CopyFrom(tool_choice)


def _tool(given: Mapping[str, Any] | inference_pb2.Tool) -> inference_pb2.Tool:
    if isinstance(given, inference_pb2.Tool):
        return given
    unknown = given.keys() - {"name", "description", "parameters"}
    if unknown:
        raise TypeError(f"a tool has name, description and parameters, this one has {', '.join(given)}")
    parameters = given.get("parameters", "")
    schema = json.dumps(parameters) if isinstance(parameters, Mapping) else parameters
    return inference_pb2.Tool(
        name=given.get("name", ""), description=given.get("description", ""), parameters_json=schema
    )


def _output_format(given: Mapping[str, Any] | inference_pb2.OutputFormat) -> inference_pb2.OutputFormat:
    if isinstance(given, inference_pb2.OutputFormat):
        return given
    values = dict(given)
    if isinstance(values.get("json_schema"), Mapping | bool):
        values["json_schema"] = json.dumps(values["json_schema"])
    if isinstance(values.get("choices"), Sequence):
        values["choices"] = inference_pb2.Choices(texts=values["choices"])
    try:
        return inference_pb2.OutputFormat(**values)
    except ValueError as error:  # of protobuf, for a form that does not exist
        forms = ", ".join(field.name for field in inference_pb2.OutputFormat.DESCRIPTOR.fields)
        raise TypeError(f"an output format is one of {forms}, this one has {', '.join(values)}") from error
