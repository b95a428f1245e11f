"""From the fields of a request to its grammar: which wins, what is refused, and what is kept."""

from __future__ import annotations

import json

import pytest

from core.errors import InvalidRequest
from router.serving.output_formats import RequestGrammars
from tandem_client.stubs.inference_pb2 import (
    ChatPrompt,
    GenerateRequest,
    OutputFormat,
    StopConditions,
    Tool,
    ToolChoice,
)
from text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("fake:tiny")
ADD = Tool(name="add", parameters_json='{"type": "object", "properties": {"a": {"type": "integer"}}}')
ODD = Tool(name="odd", parameters_json='{"type": "object", "unevaluatedProperties": false}')
REGEX = OutputFormat(regex="a+")


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
    schema = OutputFormat(json_schema=json.dumps({"const": number}))
    with pytest.raises(InvalidRequest, match=r"^output_format\.json_schema: cannot be read: .{0,200}$"):
        grammar_of(GenerateRequest(text="a", output_format=schema))


def test_an_output_that_must_not_end_is_free() -> None:
    assert grammar_of(chat(ADD, stop=StopConditions(ignore_eos=True))) == ""


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
