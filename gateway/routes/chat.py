"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refused
from gateway.field_names import named
from gateway.fleets import fleets_of
from gateway.formats.chat import ChatChunks
from gateway.guardrails import Guardrail, Message
from gateway.prompt_guardrail import check_chat, refuse_tokens, texts_of
from gateway.routes.answering import Call, Given, answer
from gateway.routes.calls import beside_the_loop, call_context, read_body, request_id_of
from gateway.schemas.chat import ChatBody, num_logprobs, wire_choice, wire_messages, wire_tools
from gateway.schemas.fields import CHAT, check_extra
from gateway.schemas.output_format import format_field, output_format_of
from gateway.schemas.sampling import GenerationFields, check_answer, common_request, stream_warnings
from tandem_client.stubs.inference_pb2 import ChatPrompt, GenerateRequest


async def chat_completions(request: Request) -> Response:
    body, given = await read_body(request, ChatBody, _given)
    names = {"prompt": "messages", "output_format": format_field(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    call = await prepare_chat(request, body, given, "chatcmpl-", names)
    form = ChatChunks(call.head(body.stream_options))
    return await answer(request, call, form, body.stream)


def _given(body: ChatBody) -> Given:
    """Call it in a thread. Raises `ApiError`."""
    warnings = check_extra(body.model_extra, CHAT) + stream_warnings(body)
    output_format, format_warnings = output_format_of(body)
    messages, message_warnings = wire_messages(body.messages)
    tools = wire_tools(body.tools, body.tool_choice)
    options = json.dumps(body.chat_template_kwargs, ensure_ascii=False) if body.chat_template_kwargs else ""
    choice = wire_choice(body.tool_choice, body.parallel_tool_calls, bool(body.tools))
    chat = ChatPrompt(messages=messages, tools=tools, template_options_json=options, tool_choice=choice)
    wire = common_request(body, _max_tokens(body), output_format, num_logprobs(body))
    return given_chat(wire, chat, warnings + format_warnings + message_warnings)


def given_chat(wire: GenerateRequest, chat: ChatPrompt, warnings: list[str]) -> Given:
    wire.chat.CopyFrom(chat)
    return Given(wire, sum(len(message.content) for message in chat.messages), warnings)


async def prepare_chat(
    request: Request, body: GenerationFields, given: Given, kind: str, names: Mapping[str, str]
) -> Call:
    """`kind`: of the id; `names`: of fields, for `named`. Raises an error that names the field."""
    context, wire = call_context(request), given.wire
    guardrail: Guardrail | None = request.app.state.guardrail
    refuse_tokens(guardrail, wire)
    model = fleets_of(request).resolve(body.model, given.num_chars, context.tag)
    if not body.stream:
        check_answer(wire, 1, model.info.context_length, "top_logprobs")
    prompt: tuple[Message, ...] = ()
    if guardrail is not None:
        with named(names):
            texts = await beside_the_loop(request, wire.chat.ByteSize(), texts_of, wire.chat)
        prompt = await check_chat(guardrail, texts)
    wire.model, wire.request_id = model.routed_name, request_id_of(kind, body.request_id, context)
    return Call(wire.request_id, model, [wire], [prompt], guardrail, given.warnings, context, names)


def _max_tokens(body: ChatBody) -> int | None:
    """None: all that fits the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", f"is {old}, but max_completion_tokens is {new}; send one of them")
    return new if new is not None else old


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
