"""POST /tokenize and /detokenize, in the shape of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refused
from gateway.field_names import named
from gateway.fleets import fleets_of
from gateway.formats.encoded import json_bytes
from gateway.http.connection import while_connected
from gateway.routes.calls import beside_the_loop, call_context, read_body, warning_headers
from gateway.schemas.base import ModelName, Schema, items
from gateway.schemas.chat import MAX_MESSAGES, MAX_TOOLS, Message, ToolSpec, wire_messages, wire_tools
from gateway.schemas.fields import FieldRule, Verdict, check_extra
from gateway.schemas.sampling import TokenId
from tandem_client.stubs.inference_pb2 import ChatPrompt, DetokenizeRequest, TokenizeRequest, TokenizeResponse

MAX_DETOKENIZE_TOKENS = 1_000_000
IDS_PER_STEP = 16 * 1024
CHARS_PER_STEP = 64 * 1024

TOKENIZE = {
    "add_special_tokens": FieldRule(
        Verdict.REFUSE, "a text gets the special tokens that the model expects, and a chat those of its template", ()
    ),
    "add_generation_prompt": FieldRule(Verdict.REFUSE, "a chat always ends with the start of the answer", (True,)),
    "continue_final_message": FieldRule(Verdict.REFUSE, "a chat always ends with the start of the answer", (False,)),
    "chat_template": FieldRule(Verdict.REFUSE, "the template of the model is always used"),
    "return_token_strs": FieldRule(Verdict.REFUSE, "send the ids to /detokenize", (False,)),
    "mm_processor_kwargs": FieldRule(Verdict.REFUSE, "the models here read text only"),
}


class TokenizeBody(Schema):
    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], items(MAX_MESSAGES, min_length=1)] | None = None
    tools: Annotated[list[ToolSpec], items(MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Schema):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], items(MAX_DETOKENIZE_TOKENS)]


async def tokenize(request: Request) -> Response:
    context = call_context(request)
    body, (wire, warnings) = await read_body(request, TokenizeBody, _tokenize_request)
    model = fleets_of(request).resolve(body.model, 0, context.tag)
    with named({} if body.messages is None else {"prompt": "messages"}):
        found = await while_connected(request.receive, model.router.tokenize(wire, context.metadata))
    length = model.info.context_length
    answer = await beside_the_loop(request, found.ByteSize(), _tokenize_answer, found, length)
    return Response(answer, 200, warning_headers(warnings), "application/json")


def _tokenize_request(body: TokenizeBody) -> tuple[TokenizeRequest, list[str]]:
    """The request and warnings. Call it in a thread. Raises `ApiError`."""
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "send either prompt or messages")
    neutral = (body.prompt is not None,)  # of add_special_tokens: a text has them, a chat has those of its template
    rule = TOKENIZE["add_special_tokens"]
    rules = TOKENIZE | {"add_special_tokens": FieldRule(rule.verdict, rule.reason, neutral)}
    warnings = check_extra(body.model_extra, rules)
    if body.prompt is not None:
        return TokenizeRequest(text=body.prompt), warnings
    messages, message_warnings = wire_messages(body.messages or [])
    tools = wire_tools(body.tools, None)
    options = json.dumps(body.chat_template_kwargs, ensure_ascii=False) if body.chat_template_kwargs else ""
    chat = ChatPrompt(messages=messages, tools=tools, template_options_json=options)
    return TokenizeRequest(chat=chat), warnings + message_warnings


def _tokenize_answer(found: TokenizeResponse, context_length: int) -> bytes:
    """Call it in a thread. No step of it holds the interpreter lock for more than `IDS_PER_STEP` ids."""
    ids, opening = found.token_ids, {"count": len(found.token_ids), "max_model_len": context_length}
    tokens = b",".join(_steps(ids, IDS_PER_STEP))
    return b'%b,"tokens":[%b],"token_strs":null}' % (json_bytes(opening)[:-1], tokens)


async def detokenize(request: Request) -> Response:
    context = call_context(request)
    body, wire = await read_body(request, DetokenizeBody, _detokenize_request)
    model = fleets_of(request).resolve(body.model, 0, context.tag)
    with named({"prompt": "tokens"}):
        found = await while_connected(request.receive, model.router.detokenize(wire, context.metadata))
    answer = await beside_the_loop(request, found.ByteSize(), _detokenize_answer, found.text)
    return Response(answer, 200, {}, "application/json")


def _detokenize_request(body: DetokenizeBody) -> DetokenizeRequest:
    check_extra(body.model_extra, {})
    return DetokenizeRequest(token_ids=body.tokens)


def _detokenize_answer(text: str) -> bytes:
    """Call it in a thread. No step of it holds the interpreter lock for more than `CHARS_PER_STEP` characters."""
    return b'{"prompt":"%b"}' % b"".join(_steps(text, CHARS_PER_STEP))


def _steps(value: Sequence[int] | str, size: int) -> Iterator[bytes]:
    """The JSON of `size` ids or characters at a time, without brackets or quotes."""
    for at in range(0, len(value), size):
        step = value[at : at + size]
        yield json_bytes(step if isinstance(step, str) else list(step))[1:-1]


ROUTES = [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]
