"""The output format and the tools of a client as the grammar that workers follow. Every error names its field."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import InvalidRequest
from router.serving.client_json import json_object, json_value, quoted
from tandem_client.stubs import inference_pb2
from text import output_format
from text.tokenizer import ModelTokenizer
from text.tool_grammar import FORMATS, NO_ARGUMENTS, tool_grammar

MAX_FORMAT_CHARS = 64 * 1024
MAX_CHOICE_TEXTS = 1024


def grammar_for(
    wire: inference_pb2.GenerateRequest, tokenizer: ModelTokenizer, compile_grammar: Callable[[str], None]
) -> str:
    """The grammar of the output; "" = any output. Raises `InvalidRequest`."""
    grammar = format_grammar(wire.output_format) if wire.HasField("output_format") else ""
    choice = wire.chat.tool_choice
    if not wire.chat.tools:
        if wire.chat.HasField("tool_choice"):
            raise InvalidRequest("chat.tool_choice", "needs tools")
        return _compiled(grammar, compile_grammar)
    is_forced = choice.required or bool(choice.name)
    if tokenizer.tool_format not in FORMATS:
        if is_forced:
            raise InvalidRequest("chat.tool_choice", "this model writes its calls in no format that can be forced")
        return _compiled(grammar, compile_grammar)
    names = [tool.name for tool in wire.chat.tools]
    if choice.name and choice.name not in names:
        raise InvalidRequest("chat.tool_choice.name", f"must be the name of a tool, is {quoted(choice.name)}")
    tools = [
        (tool.name, json_object(f"chat.tools[{index}].parameters_json", tool.parameters_json) or NO_ARGUMENTS)
        for index, tool in enumerate(wire.chat.tools)
        if choice.name in ("", tool.name)
    ]
    single = choice.single or bool(choice.name)
    with_calls = tool_grammar(
        tokenizer.tool_format, tools, tokenizer.special_tokens, required=is_forced, single=single, other=grammar
    )
    if is_forced or grammar:
        return _compiled(with_calls, compile_grammar)
    if wire.stop.ignore_eos:
        return ""
    try:
        return _compiled(with_calls, compile_grammar)
    except InvalidRequest:  # the model may call a tool whose schema cannot be forced
        return ""


def _compiled(grammar: str, compile_grammar: Callable[[str], None]) -> str:
    if grammar:
        compile_grammar(grammar)
    return grammar


def format_grammar(wire: inference_pb2.OutputFormat) -> str:
    """Raises `InvalidRequest`. Whether the grammar is right is not checked here."""
    kind = wire.WhichOneof("format")
    if kind is None:
        forms = [field.name for field in wire.DESCRIPTOR.oneofs_by_name["format"].fields]
        raise InvalidRequest("output_format", f"one of {', '.join(forms)} must be set")
    field = f"output_format.{kind}"
    match kind:
        case "json_object":
            if not wire.json_object:
                raise InvalidRequest(field, "must be true")
            return output_format.json_object_grammar()
        case "choices":
            texts = wire.choices.texts
            if not 1 <= len(texts) <= MAX_CHOICE_TEXTS:
                raise InvalidRequest(field, f"must have 1 to {MAX_CHOICE_TEXTS} texts, has {len(texts)}")
            if not all(texts):
                raise InvalidRequest(field, "must not have an empty text")
            _check_length(field, sum(map(len, texts)))
            return output_format.choice_grammar(list(texts))
        case "json_schema":
            _check_length(field, len(wire.json_schema))
            schema = json_value(field, wire.json_schema)
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(field, f"must be a JSON object, true or false, is {quoted(wire.json_schema)}")
            return output_format.json_schema_grammar(schema)
        case "regex":
            _check_length(field, len(wire.regex))
            return output_format.regex_grammar(wire.regex)
        case "lark":
            _check_length(field, len(wire.lark))
            return wire.lark
    raise AssertionError(kind)


def _check_length(field: str, num_chars: int) -> None:
    if not 1 <= num_chars <= MAX_FORMAT_CHARS:
        raise InvalidRequest(field, f"must have 1 to {MAX_FORMAT_CHARS} characters, has {num_chars}")
