"""From the fields of a chat and of an output format to a prompt and a grammar: which wins, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.model_info import ModelInfo
from core.request import MAX_JSON_CHARS
from router.serving.chat_prompt import MAX_TOOL_CALLS, MAX_TOOLS, check_chat
from router.serving.client_json import MAX_JSON_DEPTH
from router.serving.output_formats import RequestGrammars
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import ChatMessage, ChatPrompt, GenerateRequest, Tool, ToolCall, ToolChoice
from text.chat_template import ChatTemplate
from text.tokenizer import ByteCodec, ModelTokenizer, load_tokenizer

TOKENIZER = load_tokenizer("fake:tiny")
USER = ChatMessage(role="user", content="hi")
MAX_CHARS = 1_000_000


def check(wire: ChatPrompt) -> Any:
    return check_chat(wire, TOKENIZER, MAX_CHARS)


def with_call(**call: str) -> ChatPrompt:
    fields = {"id": "1", "name": "f", "arguments_json": "{}"} | call
    return ChatPrompt(messages=[USER, ChatMessage(role="assistant", tool_calls=[ToolCall(**fields)])])


def with_tool(**tool: str) -> ChatPrompt:
    return ChatPrompt(messages=[USER], tools=[Tool(**({"name": "f"} | tool))])


def said(role: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=[ChatMessage(role=role, **fields)])


def with_options(text: str) -> ChatPrompt:
    return ChatPrompt(messages=[USER], template_options_json=text)


def test_a_chat_with_tools_gets_the_form_of_chat_templates() -> None:
    wire = with_call(arguments_json='{"city": "Rome", "days": [1, 2.5, null]}')
    wire.messages.append(ChatMessage(role="tool", content="7 degrees", tool_call_id="1"))
    wire.tools.extend([Tool(name="f", description="d", parameters_json='{"type": "object"}'), Tool(name="g")])
    wire.template_options_json = '{"enable_thinking": false}'
    chat = check(wire)
    function = {"name": "f", "arguments": {"city": "Rome", "days": [1, 2.5, None]}}
    assert chat.messages[0] == {"role": "user", "content": "hi"}
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "id": "1", "function": function}]
    assert chat.messages[2] == {"role": "tool", "content": "7 degrees", "tool_call_id": "1", "name": "f"}
    assert chat.tools[0]["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert chat.options == {"enable_thinking": False}


@pytest.mark.parametrize("roles", ["system system user", "user system", "system developer user", "assistant user"])
def test_the_template_decides_on_the_order_of_roles(roles: str) -> None:
    wire = ChatPrompt(messages=[ChatMessage(role=role, content="hi") for role in roles.split()])
    assert [message["role"] for message in check(wire).messages] == roles.split()


DEEP = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
MANY = [Tool(name="f")] * (MAX_TOOLS + 1)
TOO_LONG, TOO_DEEP = " " * (MAX_JSON_CHARS + 1), f'{{"a": {"[" * 30_000}{"]" * 30_000}}}'
MANY_CALLS = [ToolCall(id="1", name="f")] * (MAX_TOOL_CALLS + 1)
TOOL, CALL = "chat.tools[0]", "chat.messages[1].tool_calls[0]"
REFUSED = {
    "too many tools": (ChatPrompt(messages=[USER], tools=MANY), "chat.tools", "at most 128"),
    "a tool twice": (ChatPrompt(messages=[USER], tools=[Tool(name="f")] * 2), "chat.tools[1].name", "unique"),
    "a name with a space": (with_tool(name="a b"), f"{TOOL}.name", "1 to 64 letters"),
    "a long name": (with_tool(name="x" * 65), f"{TOOL}.name", "1 to 64"),
    "parameters that are no JSON": (with_tool(parameters_json="{"), f"{TOOL}.parameters_json", "JSON object"),
    "parameters too long": (with_tool(parameters_json=TOO_LONG), f"{TOOL}.parameters_json", "65536 characters"),
    "parameters too deep": (with_tool(parameters_json=f'{{"a": {DEEP}}}'), f"{TOOL}.parameters_json", "32 deep"),
    "parameters far too deep": (with_tool(parameters_json=TOO_DEEP), f"{TOOL}.parameters_json", "32 deep"),
    "a description too long": (with_tool(description="x" * (MAX_CHARS + 1)), "chat", "1000000 characters"),
    "no id of a call": (with_call(id=""), f"{CALL}.id", "1 to 128"),
    "a wrong name of a call": (with_call(name="<|im_end|>"), f"{CALL}.name", "1 to 64"),
    "arguments that are text": (with_call(arguments_json='"x"'), f"{CALL}.arguments_json", "JSON object"),
    "an infinite argument": (with_call(arguments_json='{"x": 1e999}'), f"{CALL}.arguments_json", "finite"),
    "an argument NaN": (with_call(arguments_json='{"x": NaN}'), f"{CALL}.arguments_json", "NaN"),
    "half a surrogate pair": (with_call(arguments_json='{"x": "\\ud800"}'), f"{CALL}.arguments_json", "surrogate"),
    "calls of the user": (said("user", tool_calls=MANY_CALLS[:1]), "chat.messages[0].tool_calls", "only the assistant"),
    "too many calls": (said("assistant", tool_calls=MANY_CALLS), "chat.messages[0].tool_calls", "at most 128"),
    "an answer of the user to a call": (said("user", tool_call_id="1"), "chat.messages[0].tool_call_id", "only for"),
    "an answer to no call": (said("tool", tool_call_id="9"), "chat.messages[0].tool_call_id", "message before, is '9'"),
    "options that are a list": (with_options("[1]"), "chat.template_options_json", "JSON object"),
    "options that replace messages": (with_options('{"messages": []}'), "chat.template_options_json", "messages"),
    "options that are no names": (with_options('{"a b": 1}'), "chat.template_options_json", "names of variables"),
}


@pytest.mark.parametrize(("wire", "field", "says"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_field_is_named_with_its_limit(wire: ChatPrompt, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(wire)
    assert refused.value.field == field
    assert says in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_values_at_the_limits_are_accepted() -> None:
    deep = json.loads(f'{{"a": {DEEP[1:-1]}}}')
    assert check(with_tool(parameters_json=json.dumps(deep))).tools[0]["function"]["parameters"] == deep
    most = [Tool(name=f"f{n}") for n in range(MAX_TOOLS)]
    assert len(check(ChatPrompt(messages=[USER], tools=most)).tools) == MAX_TOOLS


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (with_tool(), "chat.tools"),
        (with_call(), "chat.messages[1].tool_calls"),
        (said("tool", tool_call_id="1"), "chat.messages[0].role"),
    ],
)
def test_a_template_that_does_not_know_tools_refuses_them(wire: ChatPrompt, field: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    tokenizer = ModelTokenizer(ModelInfo("test", "", 259, 1000, frozenset()), ByteCodec(), template)
    with pytest.raises(InvalidRequest, match="does not know tools") as refused:
        check_chat(wire, tokenizer, MAX_CHARS)
    assert refused.value.field == field


# ---- grammars

ADD = Tool(name="add", parameters_json='{"type": "object", "properties": {"a": {"type": "integer"}}}')
ODD = Tool(name="odd", parameters_json='{"type": "object", "unevaluatedProperties": false}')
REGEX = inference_pb2.OutputFormat(regex="a+")


def chat(*tools: Tool, choice: ToolChoice | None = None, **fields: object) -> GenerateRequest:
    return GenerateRequest(chat=ChatPrompt(tools=tools, tool_choice=choice), **fields)  # type: ignore[arg-type]


def grammar_of(wire: GenerateRequest) -> str:
    return RequestGrammars(TOKENIZER).grammar_of(wire)


def test_without_a_format_and_tools_any_output_is_allowed() -> None:
    assert grammar_of(GenerateRequest(text="a")) == grammar_of(chat()) == ""


def test_a_call_may_be_forced_allowed_or_stand_beside_a_format() -> None:
    free, forced = grammar_of(chat(ADD)), grammar_of(chat(ADD, choice=ToolChoice(required=True)))
    beside = grammar_of(chat(ADD, output_format=REGEX))
    assert len({free, forced, beside, ""}) == 4
    assert grammar_of(chat(ADD, choice=ToolChoice(required=True), output_format=REGEX)) == forced
    assert grammar_of(chat(ADD, choice=ToolChoice(name="add"))) != forced, "one call alone"


def test_a_schema_that_cannot_be_forced_is_refused_where_a_call_is_forced_and_left_to_the_model_else() -> None:
    assert grammar_of(chat(ODD)) == ""
    with pytest.raises(InvalidRequest, match="unevaluatedProperties"):
        grammar_of(chat(ODD, choice=ToolChoice(required=True)))
    assert grammar_of(chat(ADD, ODD, choice=ToolChoice(name="add"))), "the other tool is not called"


def test_tools_beyond_the_length_of_a_grammar_are_left_to_the_model_unless_they_are_forced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a" * 30_000}}}
    tools = [Tool(name=f"t{i}", parameters_json=json.dumps(schema)) for i in range(9)]
    assert grammar_of(chat(*tools)) == ""
    for forced in (chat(*tools, choice=ToolChoice(required=True)), chat(*tools, output_format=REGEX)):
        with pytest.raises(InvalidRequest, match="schemas that are forced must have at most 262144"):
            grammar_of(forced)


def test_descriptions_do_not_count_as_part_of_a_grammar() -> None:
    named = {"description": {"const": {"title": 1}}, "a": {"type": "string", "description": "a" * 30_000}}
    schema = {"type": "object", "properties": named, "title": "a" * 9, "$defs": {"title": {"enum": ["title"]}}}
    tools = [Tool(name=f"t{i}", parameters_json=json.dumps(schema)) for i in range(9)]
    grammar = grammar_of(chat(*tools, choice=ToolChoice(required=True)))
    assert '"properties": {"description": {"const": {"title": 1}}, "a": {"type": "string"}}' in grammar
    assert '"$defs": {"title": {"enum": ["title"]}}' in grammar
    assert len(grammar) < 5_000


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_a_schema_with_an_integer_of_more_than_64_bits_is_refused_by_name(number: int) -> None:
    schema = inference_pb2.OutputFormat(json_schema=json.dumps({"const": number}))
    with pytest.raises(InvalidRequest, match=r"^output_format\.json_schema: cannot be read: .{0,200}$"):
        grammar_of(GenerateRequest(text="a", output_format=schema))


def test_an_output_that_must_not_end_is_free() -> None:
    assert grammar_of(chat(ADD, stop=inference_pb2.StopConditions(ignore_eos=True))) == ""


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (chat(choice=ToolChoice(required=True)), "chat.tool_choice: needs tools"),
        (chat(ADD, choice=ToolChoice(name="sub")), "chat.tool_choice.name: must be the name of a tool, is 'sub'"),
    ],
)
def test_a_wrong_choice_is_refused(wire: GenerateRequest, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(wire)
    assert str(refused.value) == message


def test_a_format_is_slow_once() -> None:
    grammars = RequestGrammars(TOKENIZER)
    for wire in (chat(ADD), GenerateRequest(text="a", output_format=REGEX)):
        assert not grammars.is_quick(wire)
        grammar = grammars.grammar_of(wire)
        assert grammars.is_quick(wire)
        assert grammars.grammar_of(wire) == grammar != ""
    assert not grammars.is_quick(chat(ADD, choice=ToolChoice(required=True)))
    assert grammars.is_quick(GenerateRequest(text="b", output_format=REGEX))
