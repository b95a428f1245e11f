"""The output format and the tools of a client as the grammar that workers follow. Every error names its field."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from core.errors import InvalidRequest, quoted, shortened
from core.request import MAX_GRAMMAR_CHARS
from router.serving.client_json import json_object, json_value
from tandem_client.stubs import inference_pb2
from text import output_format
from text.compiled_grammars import MAX_GRAMMARS
from text.grammars import GrammarReader
from text.tokenizer import ModelTokenizer
from text.tool_formats import FORMATS
from text.tool_grammar import NO_ARGUMENTS, tool_grammar

MAX_FORMAT_CHARS = 64 * 1024  # characters of an output format; beyond: INVALID_ARGUMENT
MAX_CHOICE_TEXTS = 1024
_Key = tuple[bool | bytes, ...]


class RequestGrammars:
    """Keeps the grammars of the newest formats: agents send the same tools with every request. For every thread."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._reader = GrammarReader(lambda: tokenizer)
        self._known: OrderedDict[_Key, str] = OrderedDict()
        self._lock = threading.Lock()

    def is_quick(self, wire: inference_pb2.GenerateRequest) -> bool:
        """Whether `grammar_of` has nothing to compile, which may take 100 ms."""
        return not (wire.HasField("output_format") or wire.chat.tools) or _key(wire) in self._known

    def grammar_of(self, wire: inference_pb2.GenerateRequest) -> str:
        """The grammar of the output; "" = any output. Raises `InvalidRequest`."""
        if not wire.HasField("output_format") and not wire.HasField("chat"):
            return ""
        key = _key(wire)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        grammar = self._read(wire)
        with self._lock:
            self._known[key] = grammar
            if len(self._known) > MAX_GRAMMARS:
                self._known.popitem(last=False)
        return grammar

    def _read(self, wire: inference_pb2.GenerateRequest) -> str:
        grammar = format_grammar(wire.output_format) if wire.HasField("output_format") else ""
        choice, tool_format = wire.chat.tool_choice, self._tokenizer.tool_format
        is_forced = choice.required or bool(choice.name)
        if wire.chat.HasField("tool_choice") and not wire.chat.tools:
            raise InvalidRequest("chat.tool_choice", "needs tools")
        if is_forced and tool_format not in FORMATS:
            raise InvalidRequest("chat.tool_choice", "this model writes its calls in no format that can be forced")
        if not wire.chat.tools or tool_format not in FORMATS:
            return self._compiled(grammar)
        with_calls = tool_grammar(
            tool_format,
            _tools(wire.chat),
            self._tokenizer.special_tokens,
            required=is_forced,
            single=choice.single or bool(choice.name),
            other=grammar,
        )
        is_long = len(with_calls) > MAX_GRAMMAR_CHARS
        if is_forced or grammar:
            if is_long:
                what = f"must have at most {MAX_GRAMMAR_CHARS} characters without their descriptions"
                raise InvalidRequest("chat.tools", f"schemas that are forced {what}, have {len(with_calls)}")
            return self._compiled(with_calls)
        if is_long or wire.stop.ignore_eos:
            return ""
        try:
            return self._compiled(with_calls)
        except InvalidRequest:  # the model may call a tool whose schema cannot be forced
            return ""

    def num_accepted(self, grammar: str, token_ids: Sequence[int], is_late: Callable[[], bool] = lambda: False) -> int:
        """How many of these first tokens of an output `grammar` allows.

        Raises `InvalidRequest`, and `DeadlineExceeded` once `is_late`.
        """
        return self._reader.num_accepted(grammar, token_ids, is_late) if grammar else len(token_ids)

    def _compiled(self, grammar: str) -> str:
        if grammar:
            self._reader.compile(grammar)
        return grammar


def _key(wire: inference_pb2.GenerateRequest) -> _Key:
    chat = wire.chat
    parts = [wire.output_format, chat.tool_choice, *chat.tools]
    return wire.stop.ignore_eos, chat.HasField("tool_choice"), *(part.SerializeToString() for part in parts)


def _tools(chat: inference_pb2.ChatPrompt) -> list[tuple[str, dict[str, Any]]]:
    """The names and schemas of the tools that may be called."""
    name = chat.tool_choice.name
    if name and name not in [tool.name for tool in chat.tools]:
        raise InvalidRequest("chat.tool_choice.name", f"must be the name of a tool, is {quoted(name)}")
    return [
        (tool.name, json_object(f"chat.tools[{index}].parameters_json", tool.parameters_json) or NO_ARGUMENTS)
        for index, tool in enumerate(chat.tools)
        if name in ("", tool.name)
    ]


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
            try:
                return output_format.json_schema_grammar(schema)
            except ValueError as error:  # an integer of more than 64 bits
                raise InvalidRequest(field, f"cannot be read: {shortened(str(error))}") from None
        case "regex":
            _check_length(field, len(wire.regex))
            return output_format.regex_grammar(wire.regex)
        case "lark":
            _check_length(field, len(wire.lark))
            return wire.lark
        case _:
            raise AssertionError(kind)


def _check_length(field: str, num_chars: int) -> None:
    if not 1 <= num_chars <= MAX_FORMAT_CHARS:
        raise InvalidRequest(field, f"must have 1 to {MAX_FORMAT_CHARS} characters, has {num_chars}")
