"""From OpenAI's requests to the messages of the gRPC API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from core.errors import InvalidRequest
from gateway.errors import ApiError, api_error
from gateway.field_names import named
from gateway.routes import chat as chat_route
from gateway.routes import tokens
from gateway.schemas.chat import ChatBody, num_logprobs, wire_choice, wire_messages, wire_tools
from gateway.schemas.completions import MAX_PROMPTS, CompletionBody, check_completion
from gateway.schemas.output_format import format_field, output_format_of
from gateway.schemas.responses import (
    ResponsesBody,
    echoed_fields,
    field_names,
    input_messages,
    response_tools,
    text_format,
)
from gateway.schemas.sampling import check_answer, check_echo, common_request, stream_warnings
from tandem_client.stubs.inference_pb2 import Choices, OutputFormat, ToolChoice

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields))


def test_each_field_of_sampling_reaches_the_wire() -> None:
    body = chat(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=7, logit_bias={"5": -100}, stop="end", stop_token_ids=[3], ignore_eos=True,
        min_tokens=2, cache_salt="salt", priority=-3, user="alice", speculation=False,
    )  # fmt: skip
    wire = common_request(body, 9, None)
    sampling = wire.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 0, 7)
    assert sampling.HasField("top_k")
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (round(sampling.top_p, 3), round(sampling.min_p, 3)) == (0.9, 0.1)
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert (list(wire.stop.stop_strings), list(wire.stop.stop_token_ids)) == (["end"], [3])
    assert (wire.stop.max_tokens, wire.stop.min_tokens, wire.stop.ignore_eos) == (9, 2, True)
    assert (wire.cache_salt, wire.priority, wire.user) == ("salt", -3, "alice")
    assert wire.HasField("speculation")
    assert not wire.speculation


@pytest.mark.parametrize(("seed", "wire"), [(-1, None), (0, 0), (-2, 2**63 - 2), (-(2**63), 0), (2**63 - 1, 2**63 - 1)])
def test_a_seed_may_be_negative_and_minus_one_is_random(seed: int, wire: int | None) -> None:
    sampling = common_request(chat(seed=seed), None, None).sampling
    assert (sampling.seed if sampling.HasField("seed") else None) == wire


def test_a_field_that_is_not_given_stays_unset_on_the_wire() -> None:
    wire = common_request(chat(temperature=None), None, None)
    assert wire.sampling.ListFields() == []
    assert not wire.HasField("speculation")
    assert not wire.stop.HasField("max_tokens")


def test_messages_of_every_role_reach_the_wire() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
            {"role": "user", "content": "1+?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
    )
    messages, warnings = wire_messages(body.messages)
    assert warnings == []
    assert [message.role for message in messages] == ["developer", "user", "assistant", "tool"]
    assert messages[0].content == "Be kind."
    (call,) = messages[2].tool_calls
    assert (call.id, call.name, json.loads(call.arguments_json)) == ("call_1", "add", {"a": 1})
    assert messages[3].tool_call_id == "call_1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL | {"mood": 1}]}, "messages[0].tool_calls[0].mood"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "add", "mood": 1}}]},
            "messages[0].tool_calls[0].function.mood",
        ),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_a_message_that_breaks_a_rule_is_refused(message: dict[str, Any], param: str) -> None:
    assert param_of(lambda: wire_messages(chat(messages=[message]).messages)) == param


def param_of(read: Callable[[], object]) -> str | None:
    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    return caught.value.param


def test_tools_reach_the_wire_unless_none_may_be_called() -> None:
    body = chat(tools=[TOOL])
    (tool,) = wire_tools(body.tools, "auto")
    assert (tool.name, tool.description, json.loads(tool.parameters_json)) == ("add", "Adds.", {"type": "object"})
    assert wire_tools(body.tools, "none") == []


def test_a_wrong_field_of_a_tool_is_named_with_its_path() -> None:
    for more, param in (({"mood": 1}, "mood"), ({"function": {"name": "add", "mood": 1}}, "function.mood")):
        tool = TOOL | more
        assert param_of(lambda: wire_tools(chat(tools=[tool]).tools, "auto")) == f"tools[0].{param}"  # noqa: B023
    odd: Any = {"name": 5}, {}, {"name": "a", "parameters": []}, {"name": "a", "x": 1}
    for of_a_response, param in zip(odd, ("name", "name", "parameters", "x"), strict=True):
        tools = [{"type": "function", "name": "a"}, {"type": "function"} | of_a_response]
        body = ResponsesBody.model_validate({"input": "a", "tools": tools})
        assert param_of(lambda: response_tools(body)) == f"tools[1].{param}"  # noqa: B023
    with pytest.raises(ApiError, match="web_search"):
        response_tools(ResponsesBody.model_validate({"input": "a", "tools": [{"type": "web_search"}]}))


@pytest.mark.parametrize(
    ("choice", "parallel", "wire"),
    [
        (None, None, None),
        ("auto", True, None),
        ("auto", False, ToolChoice(single=True)),
        ("none", False, None),
        ("required", None, ToolChoice(required=True)),
        ("required", False, ToolChoice(required=True, single=True)),
        ({"type": "function", "function": {"name": "add"}}, None, ToolChoice(required=True, name="add")),
        ({"type": "function", "name": "add"}, None, ToolChoice(required=True, name="add")),
    ],
)
def test_a_choice_of_tools_reaches_the_wire(choice: Any, parallel: bool | None, wire: ToolChoice | None) -> None:
    assert wire_choice(choice, parallel, has_tools=True) == wire


@pytest.mark.parametrize(
    "choice",
    ["any", {"type": "function"}, {"type": "function", "function": 3}, {"name": "add"}, {"type": "allowed_tools"}],
)
def test_an_unknown_choice_of_tools_is_refused(choice: Any) -> None:
    with pytest.raises(ApiError, match=r"^tool_choice: must be none, auto, required"):
        wire_choice(choice, None, has_tools=True)
    with pytest.raises(ApiError, match=r"^tool_choice: needs tools"):
        wire_choice("required", None, has_tools=False)


def test_logprobs_of_a_chat_have_a_switch_and_a_number() -> None:
    assert num_logprobs(chat()) is None
    assert num_logprobs(chat(logprobs=False)) is None
    assert num_logprobs(chat(logprobs=True)) == 0
    assert num_logprobs(chat(logprobs=True, top_logprobs=5)) == 5
    assert num_logprobs(chat(logprobs=False, top_logprobs=0)) is None
    with pytest.raises(ApiError, match="top_logprobs: needs logprobs"):
        num_logprobs(chat(top_logprobs=5))


SCHEMA = {"type": "object", "properties": {"a": {"const": "\u00e9"}}}
OF_SCHEMA = OutputFormat(json_schema=json.dumps(SCHEMA, ensure_ascii=False))


@pytest.mark.parametrize(
    ("fields", "wire"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OF_SCHEMA),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, OutputFormat(regex="a+")),
        ({"guided_choice": ["a", "b"]}, OutputFormat(choices=Choices(texts=["a", "b"]))),
        ({"structured_outputs": {"json": "true"}}, OutputFormat(json_schema="true")),
        ({"structured_outputs": {"json_object": True}}, OutputFormat(json_object=True)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, OutputFormat(lark='start: "a"')),
    ],
)
def test_a_format_by_any_of_its_names(fields: dict[str, Any], wire: OutputFormat | None) -> None:
    assert output_format_of(chat(**fields)) == (wire, [])
    assert output_format_of(CompletionBody.model_validate({"prompt": "a"} | fields)) == (wire, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, r"response_format\.type: must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema\.schema: is required"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice: cannot be combined with guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, r"structured_outputs\.structural_tag: is not supported"),
    ],
)
def test_a_format_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        output_format_of(chat(**fields))


def test_the_format_of_a_response() -> None:
    body = ResponsesBody.model_validate(
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}}
    )
    assert text_format(body) == (OF_SCHEMA, [])
    assert echoed_fields(body, [])["text"]["format"] == {
        "type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA,
    }  # fmt: skip
    assert text_format(ResponsesBody.model_validate({"input": "a"})) == (None, [])
    with pytest.raises(ApiError, match=r"^text\.format\.schema: is required"):
        text_format(ResponsesBody.model_validate({"input": "a", "text": {"format": {"type": "json_schema"}}}))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "text", "schema": {"enum": [1] * 10_000}}}},
        {"tools": [{"type": "function", "name": "f", "parameters": {"enum": [1] * 10_000}}], "tool_choice": "none"},
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "function", "name": "f", "x": [1] * 10_000},
        },
        {"tools": [{"type": "function", "name": "f", "output_schema": {"enum": [1] * 10_000}}]},
        {"tools": [{"type": "function", "name": "f", "cache_control": {"type": "x" * 10_000}}]},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "description": "x" * 10_000}}},
    ],
)
def test_a_response_repeats_nothing_that_the_router_does_not_get(fields: dict[str, Any]) -> None:
    body = ResponsesBody.model_validate({"input": "a"} | fields)
    assert len(json.dumps(echoed_fields(body, response_tools(body)))) < 1000


def test_a_response_repeats_each_field_of_a_tool_that_the_model_gets() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
    body = ResponsesBody.model_validate({"input": "a", "tools": [tool, {"type": "function", "name": "g"}]})
    assert echoed_fields(body, response_tools(body))["tools"] == [tool, {"type": "function", "name": "g"}]


def test_the_name_of_the_format_of_a_response_is_bounded() -> None:
    with pytest.raises(ValidationError, match="at most 64 characters"):
        ResponsesBody.model_validate({"input": "a", "text": {"format": {"name": "n" * 65}}})


@pytest.mark.parametrize(
    "metadata", [{"a": [1]}, {"a": "b" * 513}, {"a" * 65: "b"}, dict.fromkeys("abcdefghijklmnopq", "")]
)
def test_metadata_of_a_response_has_the_bounds_of_openai(metadata: dict[str, Any]) -> None:
    body = ResponsesBody.model_validate({"input": "a", "metadata": {"a": "b"}})
    assert echoed_fields(body, [])["metadata"] == {"a": "b"}
    with pytest.raises(ValidationError, match=r"metadata"):
        ResponsesBody.model_validate({"input": "a", "metadata": metadata})


def test_options_of_a_stream_need_a_stream() -> None:
    assert stream_warnings(chat(stream=True, stream_options={"include_usage": True})) == []
    with pytest.raises(ApiError, match="needs stream"):
        stream_warnings(chat(stream_options={"include_usage": True}))
    with pytest.raises(ApiError, match=r"stream_options\.colour: unknown field"):
        stream_warnings(chat(stream=True, stream_options={"colour": 1}))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 1, [1, 2**32], [-1], [True], [[True]], [["a"]], [1.0], [1.5], [[1], 2], ["a", None],
     ["a"] * (MAX_PROMPTS + 1)],
)  # fmt: skip
def test_a_prompt_in_no_form_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be a text(,| or) |must have at most") as caught:
        CompletionBody.model_validate_json(json.dumps({"prompt": prompt}))
    assert api_error(caught.value).param == "prompt"
    assert CompletionBody.model_validate({"prompt": [0, 2**32 - 1]}).prompt == [[0, 2**32 - 1]]


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"best_of": 3, "n": 2}, {"echo": True, "logprobs": 0}])
def test_a_completion_that_the_engine_cannot_serve_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"^(best_of|echo): "):
        check_completion(CompletionBody.model_validate({"prompt": "a"} | fields))
    check_completion(CompletionBody.model_validate({"prompt": "a", "best_of": 2, "n": 2, "echo": True}))


def test_the_items_of_a_response_become_a_chat() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1 and 2+2?"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    body = ResponsesBody.model_validate({"input": items, "instructions": "Be brief."})
    messages, _ = input_messages(body)
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool"]
    assert [call.id for call in messages[2].tool_calls] == ["c1", "c2"]
    assert (messages[3].tool_call_id, messages[3].content) == ("c1", "2")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference"}, "input[0].type"),
        ({"content": "a"}, "input[0].role"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": "a", "colour": 1}, "input[0].colour"),
        ({"role": "user", "content": "a", "output": "b"}, "input[0].output"),
        ({"type": "function_call", "call_id": "1", "name": "f", "content": "a"}, "input[0].content"),
        ({"type": "function_call_output", "call_id": "1", "output": "a", "arguments": "{}"}, "input[0].arguments"),
    ],
)
def test_an_item_that_is_not_supported_is_refused(item: dict[str, Any], param: str) -> None:
    assert param_of(lambda: input_messages(ResponsesBody.model_validate({"input": [item]}))) == param


@pytest.mark.parametrize(
    ("num_choices", "max_tokens", "num_logprobs", "accepted"),
    [(1, 8192, None, True), (1, 2**20, 0, True), (1, 2**20 + 1, 0, False), (16, 3120, 20, True), (16, 3121, 20, False)],
)
def test_an_answer_in_one_piece_has_a_bound_of_log_probabilities(
    num_choices: int, max_tokens: int, num_logprobs: int | None, accepted: bool
) -> None:
    wire = common_request(chat(n=num_choices), max_tokens, None, num_logprobs)
    if accepted:
        check_answer(wire, 1, 2**21, "top_logprobs")
        return
    with pytest.raises(ApiError, match=r"^top_logprobs: .*at most 1048576"):
        check_answer(wire, 1, 2**21, "top_logprobs")


def test_an_answer_in_one_piece_has_a_bound_of_token_ids_and_of_repeated_text() -> None:
    wire = common_request(chat(n=16, return_token_ids=True), None, None)
    check_answer(wire, 256, 2048, "logprobs")
    with pytest.raises(ApiError, match=r"^return_token_ids: .* at most 8388608"):
        check_answer(wire, 256, 2049, "logprobs")
    check_echo(2, 2**20)
    with pytest.raises(ApiError, match=r"^echo: .* at most 2097152"):
        check_echo(2, 2**20 + 1)


ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "function_call", "call_id": "1", "name": "f"},
    {"type": "reasoning"},  # becomes no message
    {"type": "function_call", "call_id": "2", "name": "g"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
    {"role": "assistant", "content": "b"},
    {"type": "function_call", "call_id": "3", "name": "h"},
    {"type": "function_call_output", "call_id": "3", "output": "y", "role": "assistant"},  # its role is not used
    {"type": "function_call", "call_id": "4", "name": "i"},
    {"type": "", "role": "assistant", "content": "c"},
    {"type": "function_call", "call_id": "5", "name": "j"},
]


@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_each_part_of_a_chat_has_the_name_of_the_item_that_it_came_from(instructions: str) -> None:
    body = ResponsesBody.model_validate({"input": ITEMS, "instructions": instructions, "tools": [{}]})
    names, (messages, _) = field_names(body), input_messages(body)
    if instructions:
        assert name_of("chat.messages[0].content", names) == "instructions"
    places = {}  # item -> the names of its parts
    for position, message in enumerate(messages):
        at = f"chat.messages[{position}]"
        if message.content and message.role != "system":
            places[name_of(at, names)] = name_of(f"{at}.tool_call_id", names)
        for index, call in enumerate(message.tool_calls):
            name = name_of(f"{at}.tool_calls[{index}].name", names)
            places[name.removesuffix(".name")] = name_of(f"{at}.tool_calls[{index}].id", names)
            assert ITEMS[int(name[len("input[") : name.index("]")])]["name"] == call.name
    assert places == {f"input[{index}]": f"input[{index}].call_id" for index in range(len(ITEMS)) if index != 2}
    assert name_of("chat.tools[0].parameters_json", names) == "tools[0].parameters"


def name_of(field: str, names: dict[str, str]) -> str:
    with pytest.raises(InvalidRequest) as caught, named(names):
        raise InvalidRequest(field, "why")
    return caught.value.field


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({}, "tools"),
    ],
)
def test_an_error_of_the_form_of_the_output_names_the_field_that_asks_for_it(fields: dict[str, Any], name: str) -> None:
    names = {"output_format": format_field(chat(**fields))}
    assert name_of("output_format", names) == name_of("output_format.json_schema", names) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (None, "tools"),
        ({}, "tools"),
        ({"format": {}}, "tools"),
        ({"format": {"type": "text"}}, "tools"),
        ({"format": {"type": "json_object"}}, "text.format"),
    ],
)
def test_an_error_of_the_form_of_a_response_names_the_field_that_asks_for_it(text: Any, name: str) -> None:
    body = ResponsesBody.model_validate({"input": "a", "text": text})
    assert name_of("output_format", field_names(body)) == name


def test_a_text_as_input_is_named_input() -> None:
    names = field_names(ResponsesBody.model_validate({"input": "a", "text": {"format": {"type": "json_object"}}}))
    fields = ("prompt", "chat.messages[0].content", "max_tokens", "output_format")
    assert [name_of(field, names) for field in fields] == ["input", "input", "max_output_tokens", "text.format"]


def test_options_of_the_template_have_the_same_json_on_every_route() -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "é"}}
    wire, _ = tokens._tokenize_request(tokens.TokenizeBody.model_validate(fields))
    given = chat_route._given(ChatBody.model_validate(fields))
    assert wire.chat.template_options_json == given.wire.chat.template_options_json == '{"a": "é"}'
