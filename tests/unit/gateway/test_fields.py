"""Fields without effect: ignored, warned of, or refused by name; and the document that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParameters
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParameters
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParameters
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition

from docs.gateway_fields import DOCUMENT, GROUPS, render
from gateway.errors import ApiError
from gateway.schemas.base import Schema
from gateway.schemas.chat import ChatBody, ContentPart, FunctionSpec, Message, MessageToolCall, ToolSpec
from gateway.schemas.completions import CompletionBody
from gateway.schemas.fields import (
    CALL,
    CHAT,
    COMPLETION,
    ITEM,
    MESSAGE,
    PART,
    RESPONSES,
    TOOL,
    FieldRule,
    check_extra,
)
from gateway.schemas.responses import InputItem, ResponsesBody, ResponseTool


def test_the_document_lists_every_field() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert render(text) == text, "run `python -m docs.gateway_fields`"


@pytest.mark.parametrize("group", GROUPS)
def test_null_and_neutral_values_ask_for_nothing(group: str) -> None:
    rules = GROUPS[group]
    assert check_extra(dict.fromkeys(rules), rules) == []
    for name, rule in rules.items():
        for value in rule.neutral:
            assert check_extra({name: value}, rules) == []


def test_a_field_with_a_warning_gives_its_reason() -> None:
    assert check_extra({"store": True}, CHAT) == ["store has no effect: nothing is stored"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("suffix", "end", "unsupported_parameter"), ("prompt_embeds", {}, "unsupported_parameter"),
     ("tempreture", 1, "unknown_parameter"), ("tempreture", None, "unknown_parameter")],
)  # fmt: skip
def test_a_refused_field_is_named(name: str, value: Any, code: str) -> None:
    for path in ("", "a[2]."):
        with pytest.raises(ApiError) as caught:
            check_extra({name: value}, COMPLETION, path)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, path + name, code)
        assert caught.value.message.startswith(f"{path}{name}: ")


def schemas_under(schema: type[Schema]) -> Iterator[type[Schema]]:
    for each in schema.__subclasses__():
        yield each
        yield from schemas_under(each)


def test_null_means_not_set_for_every_field_that_may_be_left_out() -> None:
    fields = [(schema, name) for schema in schemas_under(Schema) for name in schema.model_fields]
    assert len(fields) > 100
    for schema, name in fields:
        field = schema.model_fields[name]
        if not field.is_required():
            schema.__pydantic_validator__.validate_assignment(schema.model_construct(), name, None)


@pytest.mark.parametrize(
    ("parameters", "schema", "rules"),
    [
        (ChatParameters, ChatBody, CHAT),
        (CompletionParameters, CompletionBody, COMPLETION),
        (ResponseParameters, ResponsesBody, RESPONSES),
        (ChatCompletionUserMessageParam, Message, MESSAGE),
        (ChatCompletionAssistantMessageParam, Message, MESSAGE),
        (ChatCompletionToolMessageParam, Message, MESSAGE),
        (ChatCompletionContentPartTextParam, ContentPart, PART),
        (ChatCompletionMessageFunctionToolCallParam, MessageToolCall, CALL),
        (ChatCompletionFunctionToolParam, ToolSpec, TOOL),
        (FunctionDefinition, FunctionSpec, TOOL),
        (ResponseOutputTextParam, ContentPart, PART),
        (EasyInputMessageParam, InputItem, ITEM),
        (ResponseOutputMessageParam, InputItem, ITEM),
        (ResponseFunctionToolCallParam, InputItem, ITEM),
        (FunctionCallOutput, InputItem, ITEM),
        (FunctionToolParam, ResponseTool, TOOL),
    ],
)
def test_every_field_of_openais_client_has_one_place(parameters: Any, schema: Any, rules: dict[str, FieldRule]) -> None:
    assert not set(parameters.__annotations__) - set(schema.model_fields) - set(rules)
    assert not set(schema.model_fields) & set(rules)
