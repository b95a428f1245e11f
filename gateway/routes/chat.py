"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refused
from gateway.fleets import fleets_of
from gateway.formats.chat import ChatChunks
from gateway.formats.usage import UsageSum
from gateway.prompt_guardrail import check_chat, guardrail_of, refuse_logprobs
from gateway.routes.answering import Call, answer_object, answer_stream
from gateway.routes.calls import call_context, read_body, request_id_of
from gateway.schemas.chat import ChatBody, num_logprobs, wire_choice, wire_messages, wire_tools
from gateway.schemas.fields import CHAT, check_extra
from gateway.schemas.output_format import format_field, output_format_of
from gateway.schemas.sampling import check_answer_size, common_request, stream_warnings
from tandem_client.stubs.inference_pb2 import ChatPrompt, OutputFormat


async def chat_completions(request: Request) -> Response:
    body, given = await read_body(request, ChatBody, _given)
    call = await _prepare(request, body, given)
    options = body.stream_options
    wants_receipt = call.context.wants_receipt or bool(options and options.include_receipt)
    usage = UsageSum(body.num_choices, wants_receipt)
    with_usage = wants_receipt or bool(options and options.include_usage)
    form = ChatChunks(call.head(), body.num_choices, usage, with_usage)
    return await (answer_stream if body.stream else answer_object)(request, call, form)


class GivenChat(NamedTuple):
    """The parts of a body that grow with its size, as the router takes them."""

    chat: ChatPrompt
    output_format: OutputFormat | None
    num_chars: int  # of all messages
    warnings: list[str]


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
    return GivenChat(chat, output_format, num_chars, warnings + format_warnings + message_warnings)


async def _prepare(request: Request, body: ChatBody, given: GivenChat) -> Call:
    """Raises an error that names the field."""
    context, guardrail, chat = call_context(request), guardrail_of(request), given.chat
    refuse_logprobs(guardrail, body.logprobs or None)
    model = fleets_of(request).resolve(body.model, given.num_chars, context.tag)
    max_tokens, logprobs, longest = _max_tokens(body), num_logprobs(body), model.info.context_length
    if not body.stream:
        check_answer_size("top_logprobs", body.num_choices, min(max_tokens or longest, longest), logprobs)
    prompt = await check_chat(guardrail, chat)
    call_id = request_id_of("chatcmpl-", body.request_id, context)
    wire = common_request(body, max_tokens, model.routed_name, call_id)
    wire.chat.CopyFrom(chat)
    if given.output_format is not None:
        wire.output_format.CopyFrom(given.output_format)
    if logprobs is not None:
        wire.logprobs = logprobs
    wire.n = body.num_choices
    names = {"prompt": "messages", "output_format": format_field(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return Call(call_id, model, [wire], [prompt], guardrail, given.warnings, context, names)


def _max_tokens(body: ChatBody) -> int | None:
    """None: all that fits the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", f"is {old}, but max_completion_tokens is {new}; send one of them")
    return new if new is not None else old


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
