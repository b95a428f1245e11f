"""Every parser of client bytes, for tools/fuzz/costs.py: its limit, its inputs, and what it does with them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import uvicorn
from pydantic import ValidationError
from uvicorn.server import ServerState

from core.config import GatewayConfig, RouterConfig
from core.request import MAX_STOP_STRING_CHARS
from gateway.errors import ApiError, invalid
from gateway.formats.encoded import json_pieces
from gateway.formats.outputs import AnswerHead
from gateway.formats.responses import ResponseEvents
from gateway.http.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol
from gateway.routes import calls, chat, completions, responses, tokens
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.json_size import work_of
from gateway.schemas.responses import ResponsesBody, field_names
from protos import kserve_pb2
from router.kserve.kserve_tensors import decode_request
from router.serving.call_writer import TURN_ITEMS
from router.serving.choice_stream import CALL_ITEMS, MAX_CHUNK_ITEMS
from router.serving.output_formats import MAX_FORMAT_CHARS, RequestGrammars
from router.serving.validation import prepare
from tandem_client.stubs.inference_pb2 import (
    ChatMessage,
    ChatPrompt,
    Choices,
    GenerateRequest,
    OutputFormat,
    StopConditions,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.unit.gateway.test_http_protocol import Transport
from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer, load_tokenizer
from text.tool_calls import ToolCallParser
from text.tool_formats import FORMATS
from tools.fuzz.costs import Parser, Turns
from tools.fuzz.growing import PIECES, Grown, json_inside, json_text, text
from tools.fuzz.servers import BODIES, INFER

READ_BYTES = 256 * 1024  # that asyncio reads at once
# Of 128 characters each: what a turn of the loop takes of an output with calls (router/serving/choice_stream.py)
TURN_TOKENS = (TURN_ITEMS + MAX_CHUNK_ITEMS) // CALL_ITEMS
MODELS = ("fake:tiny", "smollm2-135m")  # one knows tools, one has a tokenizer of Hugging Face
SCHEMAS = (
    '{"type":"string","pattern":"a+b"}', '{"$ref":"#"}', '{"anyOf":[{},{}]}', '{"allOf":[{"format":"date"}]}',
    '{"patternProperties":{"a":{},"b+":{}}}', '{"enum":[1,"a",{}]}', '{"multipleOf":7}', '{"minLength":9}',
    '{"const":[[]]}',
    '{"properties":{"a":{},"b":{}},"required":["a"]}', '{"items":{"pattern":"x"}}', '{"$ref":"#/$defs/a1"}', '"a"', "1",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"items": {}}}, "anyOf": [{}], "allOf": [{}], "enum": [1], "$defs": {},
          "prefixItems": [{}], "required": ["a"], "patternProperties": {}}  # fmt: skip


FURTHER: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"}, "guided_choice": ["a"]},
    "/v1/responses": {"model": "m", "metadata": {"a": "b"}, "instructions": "a"},
}


# ---- HTTP


def _grown_http(rng: random.Random) -> Grown:
    head, size_of_part = "POST / HTTP/1.1\r\nhost: a\r\n", rng.choice((1, 7, 4096))
    inside = text(rng)
    where = rng.choice(
        ("{}", "GET /{} HTTP/1.1\r\n\r\n", head + "{}", head + "a: {}\r\n\r\n", "headers", "chunks", "body")
    )
    if where == "headers":
        return Grown(where, lambda size: (head + "a: b\r\n" * (size // 6)).encode())
    if where == "chunks":
        begun, part = f"{head}transfer-encoding: chunked\r\n\r\n", f"{size_of_part:x}\r\n{'a' * size_of_part}\r\n"
        return Grown(f"chunks of {size_of_part}", lambda size: (begun + part * (size // len(part))).encode())
    if where == "body":
        where = f"{head}content-length: 9999999\r\n\r\n{{}}"
    before, _, behind = where.partition("{}")
    return Grown(f"{where} with {inside.what}", lambda size: (before + inside.of(size) + behind).encode())


async def _application(_: object, __: object, ___: object) -> None:
    """Never begins."""


CONFIG = uvicorn.Config(_application, interface="asgi3", log_config=None, access_log=False, proxy_headers=False)


class _Loop:
    """Runs nothing: no application begins."""

    def time(self) -> float:
        return 0.0

    def create_task(self, task: Any, **_: object) -> Any:
        task.close()
        return _Loop()

    def add_done_callback(self, *_: object) -> None:
        pass

    call_later = create_task


def _http(data: bytes) -> Turns:
    protocol = BoundedHttpProtocol(config=CONFIG, server_state=ServerState(), app_state={}, _loop=_Loop())
    protocol.connection_made(Transport(protocol))
    yield None
    for start in range(0, len(data), READ_BYTES):
        protocol.data_received(data[start : start + READ_BYTES])
        yield None


def _grown_body(path: str) -> Callable[[random.Random], Grown]:
    def grow(rng: random.Random) -> Grown:
        grown = json_inside(BODIES[path] | FURTHER.get(path, {}), rng)
        return Grown(grown.what, lambda size: grown.of(size).encode(errors="replace"))

    return grow


def _body(path: str, schema: Any, convert: Callable[[Any], Any]) -> Parser:
    def parse(data: bytes) -> Turns:
        work_of(data)
        yield None
        try:
            calls._read(data, schema, convert)
        except ValidationError as error:
            raise invalid(error) from None
        yield None

    # The parser of pydantic holds the lock for all of a body, whose weight is bounded: 60 ms for 8 MB of escapes.
    return Parser(GatewayConfig().max_body_bytes, _grown_body(path), parse, ends_s=1.5, holds_s=0.08)


def _echo(data: bytes) -> Turns:
    """What the loop does with a body that is read: an answer repeats parts of it."""
    try:
        body, (_, echoed) = calls._read(data, ResponsesBody, responses._given)
    except (ApiError, ValidationError):
        body = None
    yield Ellipsis
    if body is None:
        return
    field_names(body)
    yield None
    head = AnswerHead("i", "m", 0, frozenset(), ())
    json_pieces(ResponseEvents(head, echoed).result())
    yield None


# ---- the router


@functools.cache
def _router(model: str) -> tuple[ModelTokenizer, RequestGrammars, RouterConfig]:
    tokenizer = load_tokenizer(model)
    return tokenizer, RequestGrammars(tokenizer), RouterConfig()


def _message(content: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=[ChatMessage(role="user", content=content)], **fields)


def _called(num_calls: int, arguments: str) -> ChatPrompt:
    call = ToolCall(id="a", name="f", arguments_json=arguments)
    return ChatPrompt(messages=[ChatMessage(role="assistant", tool_calls=[call] * num_calls)])


def _grown_request(rng: random.Random) -> Grown:
    """A good request, but for one field that grows."""
    inside, value, piece, parses = text(rng), json_text(rng), rng.choice(PIECES), rng.random() < 0.5
    fields: dict[str, Callable[[int], GenerateRequest]] = {
        "text": lambda size: GenerateRequest(text=inside.of(size), parse_special_tokens=parses),
        "content": lambda size: GenerateRequest(chat=_message(inside.of(size))),
        "messages": lambda size: GenerateRequest(
            chat=ChatPrompt(messages=[ChatMessage(role="user", content=piece)] * min(1024, size // 128))
        ),
        "calls": lambda size: GenerateRequest(
            chat=ChatPrompt(messages=list(_called(128, value.of(32)).messages) * (size // 8192))
        ),
        "arguments": lambda size: GenerateRequest(chat=_called(1, value.of(size // 16))),
        "parameters": lambda size: GenerateRequest(
            chat=_message("a", tools=[Tool(name=f"f{at}", parameters_json=value.of(size // 16)) for at in range(9)])
        ),
        "options": lambda size: GenerateRequest(chat=_message("a", template_options_json=value.of(size // 16))),
        "stop": lambda size: GenerateRequest(
            text="a", stop=StopConditions(stop_strings=[inside.of(size)[at : at + 256] for at in range(16)])
        ),
        "resume": lambda size: GenerateRequest(
            chat=_message("a", tools=[Tool(name="f")]), resume=inside.of(size // 128).encode(errors="replace"),
            stop=StopConditions(max_tokens=2**20, stop_strings=[piece * 9])
        ),
    }  # fmt: skip
    field = rng.choice(list(fields))
    return Grown(f"{field}: {inside.what}; {value.what}; {piece!r}", fields[field])


def _grown_format(rng: random.Random) -> Grown:
    """One form of an output, or tools."""
    inside, schema = text(rng), json_text(rng, SCHEMAS)
    if rng.random() < 0.6:
        schema = json_inside(
            {"type": "object"} | {rng.choice(list(SCHEMA)): SCHEMA[rng.choice(list(SCHEMA))]}, rng, SCHEMAS
        )
    forms: dict[str, Callable[[int], dict[str, Any]]] = {
        "json_schema": lambda size: {"json_schema": schema.of(size)},
        "regex": lambda size: {"regex": inside.of(size)},
        "choices": lambda size: {"choices": Choices(texts=[f"{inside.of(60)}{at}" for at in range(size // 64)])},
        "lark": lambda size: {"lark": inside.of(size)},
        "lark rules": lambda size: {
            "lark": "start: a0\n" + "".join(f"a{at}: {inside.of(9)!r} a{at + 1}?\n" for at in range(size // 32))
        },
        "lark text": lambda size: {"lark": f"start: {json.dumps(inside.of(size // 2))}"},
        "lark regex": lambda size: {"lark": f"start: /{inside.of(size)}/"},
        "%json": lambda size: {"lark": f"start: %json {schema.of(size)}"},
        "lark in JSON": lambda size: {"lark": json.dumps({"grammars": [{"lark_grammar": inside.of(size)}]})},
    }
    form = rng.choice([*forms, "tools"])
    if form == "tools":
        few = rng.choice((1, 9, 128))
        tools = lambda size: [Tool(name=f"f{at}", parameters_json=schema.of(size // few)) for at in range(few)]  # noqa: E731
        choice = ToolChoice(required=rng.random() < 0.7)
        chat_of = lambda size: _message("a", tools=tools(size), tool_choice=choice)  # noqa: E731
        return Grown(f"{few} tools: {schema.what}", lambda size: GenerateRequest(chat=chat_of(size)))
    return Grown(f"{form}: {inside.what}; {schema.what}",
                 lambda size: GenerateRequest(text="a", output_format=OutputFormat(**forms[form](size))))  # fmt: skip


def _preparing(model: str) -> Callable[[GenerateRequest], Turns]:
    def parse(wire: GenerateRequest) -> Turns:
        tokenizer, grammars, config = _router(model)
        compiled = grammars._reader._compiled
        assert compiled.tokenizer
        grammars._known.clear()
        compiled._kept.clear()
        yield Ellipsis
        prepare(wire, tokenizer, config, "a", lambda: 0, (), grammars)
        yield None

    return parse


def _grown_tensors(rng: random.Random) -> Grown:
    """The message is bytes until it is parsed."""
    inside, value = text(rng), json_text(rng)
    good = INFER.SerializeToString()
    infer = kserve_pb2.ModelInferRequest
    fields: dict[str, Callable[[int], bytes]] = {
        "outputs": lambda size: infer(outputs=[infer.InferRequestedOutputTensor()]).SerializeToString() * (size // 2),
        "inputs": lambda size: infer(inputs=[infer.InferInputTensor()]).SerializeToString() * (size // 2),
        "raw": lambda size: infer(raw_input_contents=[b""]).SerializeToString() * (size // 2),
        "shape": lambda size: infer(inputs=[infer.InferInputTensor(name="text_input", datatype="BYTES",
                                                                   shape=[1] * (size - 99))]).SerializeToString(),
        "ids": lambda size: infer(inputs=[infer.InferInputTensor(name="input_ids", datatype="INT32", shape=[1])],
                                  raw_input_contents=[bytes(size)]).SerializeToString(),
        "parameters": lambda size: infer(
            parameters={f"a{at}": kserve_pb2.InferParameter(bool_param=True) for at in range(size // 16)}
        ).SerializeToString(),
        "stop": lambda size: infer(
            parameters={"stop": kserve_pb2.InferParameter(string_param=value.of(size))}
        ).SerializeToString(),
        "text": lambda size: infer(
            inputs=[infer.InferInputTensor(contents=kserve_pb2.InferTensorContents(
                bytes_contents=[inside.of(size).encode(errors="replace")]))]
        ).SerializeToString(),
    }  # fmt: skip
    field = rng.choice(list(fields))
    append = rng.random() < 0.5
    return Grown(f"{field}: {inside.what}; {value.what}",
                 lambda size: (good if append or field == "outputs" else b"") + fields[field](size))  # fmt: skip


def _tensors(data: bytes) -> Turns:
    wire = kserve_pb2.ModelInferRequest.FromString(data)  # grpc does this: 4 MB of empty messages take 100 ms
    yield Ellipsis
    decode_request(wire, 8191)
    yield None


# ---- outputs


def _grown_output(rng: random.Random) -> Grown:
    inside, each = text(rng), rng.choice((4, 4 * TURN_TOKENS, 128 * TURN_TOKENS))
    return Grown(f"{inside.what} in pieces of {each}", lambda size: (inside.of(size), each))


def _tool_calls(form: str) -> Callable[[tuple[str, int]], Turns]:
    def parse(given: tuple[str, int]) -> Turns:
        output, each = given
        parser = ToolCallParser(FORMATS[form], str)
        for start in range(0, len(output), each):
            parser.push(output[start : start + each])
            yield None
        parser.finish()
        yield None

    return parse


def _stop_strings(given: tuple[str, int]) -> Turns:
    output, each = given
    stops = StopStrings([output[at : at + MAX_STOP_STRING_CHARS - at] + "\ufffe" for at in range(1, 16)])
    yield None
    stream = TextStream(IncrementalDetokenizer(lambda token_id: chr(token_id).encode(errors="replace")), stops)
    ids = list(map(ord, output))
    for start in range(0, len(ids), each):
        stream.push(ids[start : start + each])
        yield None
    stream.flush()
    yield None


PARSERS: dict[str, Parser] = {
    "http": Parser(8 * MAX_HEAD_BYTES, _grown_http, _http),
    "/v1/chat/completions": _body("/v1/chat/completions", ChatBody, chat._given),
    "/v1/completions": _body("/v1/completions", CompletionBody, completions._given),
    "/v1/responses": _body("/v1/responses", ResponsesBody, responses._given),
    "/tokenize": _body("/tokenize", tokens.TokenizeBody, tokens._tokenize_request),
    "/detokenize": _body("/detokenize", tokens.DetokenizeBody, tokens._detokenize_request),
    "answer of /v1/responses": Parser(GatewayConfig().max_body_bytes, _grown_body("/v1/responses"), _echo),
    **{
        f"request of {model}": Parser(RouterConfig().max_prompt_chars, _grown_request, _preparing(model), ends_s=5.0)
        for model in MODELS
    },
    **{
        f"format of {model}": Parser(MAX_FORMAT_CHARS, _grown_format, _preparing(model), ends_s=2.0) for model in MODELS
    },
    "KServe": Parser(RouterConfig().max_message_bytes, _grown_tensors, _tensors),
    **{f"calls of {form}": Parser(256 * 1024, _grown_output, _tool_calls(form)) for form in FORMATS},
    "stop strings": Parser(256 * 1024, _grown_output, _stop_strings),
}
