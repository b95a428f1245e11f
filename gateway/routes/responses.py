"""POST /v1/responses, in its text form: a translation of a chat, with events of its own."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.formats.encoded import EncodedValue
from gateway.formats.responses import ResponseEvents
from gateway.formats.usage import UsageSum
from gateway.routes.answering import answer_object, answer_stream
from gateway.routes.calls import read_body
from gateway.routes.chat import GivenChat, prepare_chat
from gateway.schemas.chat import wire_choice, wire_tool
from gateway.schemas.fields import RESPONSES, check_extra
from gateway.schemas.responses import (
    ResponsesBody,
    echoed_fields,
    field_names,
    input_messages,
    response_tools,
    text_format,
)
from tandem_client.stubs.inference_pb2 import ChatPrompt


async def responses(request: Request) -> Response:
    body, given = await read_body(request, ResponsesBody, _given)
    call = await prepare_chat(request, body, given.chat, "resp_", field_names(body))
    form = ResponseEvents(call.head(), given.echoed, UsageSum(1, call.context.wants_receipt))
    return await (answer_stream if body.stream else answer_object)(request, call, form)


class GivenResponse(NamedTuple):
    chat: GivenChat
    echoed: dict[str, EncodedValue]  # encoded once, beside the loop


def _given(body: ResponsesBody) -> GivenResponse:
    """Call it in a thread. Raises `ApiError`."""
    output_format, warnings = text_format(body)
    warnings += check_extra(body.model_extra, RESPONSES)
    messages, item_warnings = input_messages(body)
    tools = response_tools(body)
    choice = wire_choice(body.tool_choice, body.parallel_tool_calls, bool(body.tools))
    chat = ChatPrompt(messages=messages, tools=map(wire_tool, tools), tool_choice=choice)
    num_chars = sum(len(message.content) for message in messages)
    given = GivenChat(chat, num_chars, output_format, warnings + item_warnings, body.max_output_tokens)
    echoed = {name: EncodedValue(value) for name, value in echoed_fields(body, tools).items()}
    return GivenResponse(given, echoed)


ROUTES = [Route("/v1/responses", responses, methods=["POST"])]
