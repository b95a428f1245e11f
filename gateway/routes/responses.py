"""POST /v1/responses, in its text form."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.fleets import fleets_of
from gateway.formats.responses import ResponseEvents
from gateway.formats.usage import UsageSum
from gateway.prompt_guardrail import check_chat, guardrail_of
from gateway.routes.answering import Call, answer_object, answer_stream
from gateway.routes.calls import call_context, read_body, request_id_of
from gateway.routes.chat import GivenChat
from gateway.schemas.chat import wire_choice
from gateway.schemas.fields import RESPONSES, check_extra
from gateway.schemas.responses import (
    ResponsesBody,
    echoed_fields,
    field_names,
    input_messages,
    response_tools,
    text_format,
)
from gateway.schemas.sampling import common_request
from tandem_client.stubs.inference_pb2 import ChatPrompt


async def responses(request: Request) -> Response:
    body, given = await read_body(request, ResponsesBody, _given)
    call = await _prepare(request, body, given)
    usage = UsageSum(1, call.context.wants_receipt)
    form = ResponseEvents(call.head(), echoed_fields(body), usage)
    return await (answer_stream if body.stream else answer_object)(request, call, form)


def _given(body: ResponsesBody) -> GivenChat:
    """Call it in a thread. Raises `ApiError`."""
    output_format, warnings = text_format(body)
    warnings += check_extra(body.model_extra, RESPONSES)
    messages, item_warnings = input_messages(body)
    warnings += item_warnings
    tools = response_tools(body)
    choice = wire_choice(body.tool_choice, body.parallel_tool_calls, bool(body.tools))
    chat = ChatPrompt(messages=messages, tools=tools, tool_choice=choice)
    return GivenChat(chat, output_format, sum(len(message.content) for message in messages), warnings)


async def _prepare(request: Request, body: ResponsesBody, given: GivenChat) -> Call:
    """Raises an error that names the field."""
    context, guardrail, chat = call_context(request), guardrail_of(request), given.chat
    model = fleets_of(request).resolve(body.model, given.num_chars, context.tag)
    prompt = await check_chat(guardrail, chat)
    call_id = request_id_of("resp_", body.request_id, context)
    wire = common_request(body, body.max_output_tokens, model.routed_name, call_id)
    wire.chat.CopyFrom(chat)
    if given.output_format is not None:
        wire.output_format.CopyFrom(given.output_format)
    return Call(call_id, model, [wire], [prompt], guardrail, given.warnings, context, field_names(body))


ROUTES = [Route("/v1/responses", responses, methods=["POST"])]
