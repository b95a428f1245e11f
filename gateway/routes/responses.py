"""POST /v1/responses, in its text form: a translation of a chat, with events of its own."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.formats.encoded import EncodedValue
from gateway.formats.responses import ResponseEvents
from gateway.routes.answering import Given, answer
from gateway.routes.calls import read_body
from gateway.routes.chat import given_chat, prepare_chat
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
from gateway.schemas.sampling import common_request
from tandem_client.stubs.inference_pb2 import ChatPrompt


async def responses(request: Request) -> Response:
    body, (given, echoed) = await read_body(request, ResponsesBody, _given)
    call = await prepare_chat(request, body, given, "resp_", field_names(body))
    form = ResponseEvents(call.head(), echoed)
    return await answer(request, call, form, body.stream)


def _given(body: ResponsesBody) -> tuple[Given, dict[str, EncodedValue]]:
    """The request, and the fields that the answer repeats, encoded once. Call it in a thread. Raises `ApiError`."""
    output_format, warnings = text_format(body)
    warnings += check_extra(body.model_extra, RESPONSES)
    messages, item_warnings = input_messages(body)
    tools = response_tools(body)
    choice = wire_choice(body.tool_choice, body.parallel_tool_calls, bool(body.tools))
    chat = ChatPrompt(messages=messages, tools=map(wire_tool, tools), tool_choice=choice)
    wire = common_request(body, body.max_output_tokens, output_format)
    echoed = {name: EncodedValue(value) for name, value in echoed_fields(body, tools).items()}
    return given_chat(wire, chat, warnings + item_warnings), echoed


ROUTES = [Route("/v1/responses", responses, methods=["POST"])]
