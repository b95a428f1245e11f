"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refused
from gateway.field_names import named
from gateway.fleets import fleets_of
from gateway.formats.chat import ChatChunks
from gateway.guardrails import Guardrail, Message
from gateway.prompt_guardrail import check_chat, refuse_tokens, texts_of
from gateway.routes.answering import Call, answer_object, answer_stream, usage_of
from gateway.routes.calls import beside_the_loop, call_context, read_body, request_id_of
from gateway.schemas.chat import ChatBody, num_logprobs, wire_choice, wire_messages, wire_tools
from gateway.schemas.fields import CHAT, check_extra
from gateway.schemas.output_format import format_field, output_format_of
from gateway.schemas.sampling import (
    GenerationFields,
    check_answer_size,
    check_num_token_ids,
    common_request,
    stream_warnings,
)
from tandem_client.stubs.inference_pb2 import ChatPrompt, OutputFormat


async def chat_completions(request: Request) -> Response:
    body, given = await read_body(request, ChatBody, _given)
    names = {"prompt": "messages", "output_format": format_field(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    call = await prepare_chat(request, body, given, "chatcmpl-", names)
    form = ChatChunks(call.head(), body.num_choices, *usage_of(body, call))
    return await (answer_stream if body.stream else answer_object)(request, call, form)


class GivenChat(NamedTuple):
    """A chat as the router takes it, without the fields that every request has."""

    chat: ChatPrompt
    num_chars: int  # of all messages
    output_format: OutputFormat | None
    warnings: list[str]
    max_tokens: int | None  # None: all that fits the context
    num_logprobs: int | None = None  # None: no log-probabilities
    num_choices: int = 1
    with_token_ids: bool = False


def _given(body: ChatBody) -> GivenChat:
    """Call it in a thread. Raises `ApiError`."""
    warnings = check_extra(body.model_extra, CHAT) + stream_warnings(body)
    output_format, format_warnings = output_format_of(body)
    messages, message_warnings = wire_messages(body.messages)
    tools = wire_tools(body.tools, body.tool_choice)
    options = json.dumps(body.chat_template_kwargs, ensure_ascii=False) if body.chat_template_kwargs else ""
    choice = wire_choice(body.tool_choice, body.parallel_tool_calls, bool(body.tools))
    chat = ChatPrompt(messages=messages, tools=tools, template_options_json=options, tool_choice=choice)
    num_chars = sum(len(message.content) for message in messages)
    warnings += format_warnings + message_warnings
    return GivenChat(
        chat, num_chars, output_format, warnings, _max_tokens(body), num_logprobs(body), body.num_choices,
        bool(body.return_token_ids),
    )  # fmt: skip


async def prepare_chat(
    request: Request, body: GenerationFields, given: GivenChat, kind: str, names: Mapping[str, str]
) -> Call:
    """`kind`: of the id; `names`: of fields, for `named`. Raises an error that names the field."""
    context, chat = call_context(request), given.chat
    guardrail: Guardrail | None = request.app.state.guardrail
    refuse_tokens(guardrail, given.num_logprobs, given.with_token_ids)
    model = fleets_of(request).resolve(body.model, given.num_chars, context.tag)
    if not body.stream:
        longest = min(given.max_tokens or model.info.context_length, model.info.context_length)
        check_answer_size("top_logprobs", given.num_choices, longest, given.num_logprobs)
        if given.with_token_ids:
            check_num_token_ids(given.num_choices, longest)
    prompt: tuple[Message, ...] = ()
    if guardrail is not None:
        with named(names):
            texts = await beside_the_loop(request, chat.ByteSize(), texts_of, chat)
        prompt = await check_chat(guardrail, texts)
    call_id = request_id_of(kind, body.request_id, context)
    wire = common_request(body, given.max_tokens, model.routed_name, call_id)
    wire.chat.CopyFrom(chat)
    wire.n = given.num_choices
    if given.output_format is not None:
        wire.output_format.CopyFrom(given.output_format)
    if given.num_logprobs is not None:
        wire.logprobs = given.num_logprobs
    return Call(call_id, model, [wire], [prompt], guardrail, given.warnings, context, names)


def _max_tokens(body: ChatBody) -> int | None:
    """None: all that fits the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", f"is {old}, but max_completion_tokens is {new}; send one of them")
    return new if new is not None else old


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
