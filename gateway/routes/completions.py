"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.fleets import ServedModel, fleets_of
from gateway.formats.completion import CompletionAnswer, CompletionChunks
from gateway.formats.usage import UsageSum
from gateway.guardrails import Guardrail, Message
from gateway.http.connection import while_connected
from gateway.prompt_guardrail import check_text, guardrail_of, refuse_logprobs
from gateway.routes.answering import Call, answer_object, answer_stream
from gateway.routes.calls import call_context, read_body, request_id_of
from gateway.schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody, Prompt, check_completion
from gateway.schemas.fields import COMPLETION, check_extra
from gateway.schemas.output_format import output_format_of
from gateway.schemas.sampling import common_request, stream_warnings
from tandem_client.stubs.inference_pb2 import DetokenizeRequest, GenerateRequest, TokenIds


async def completions(request: Request) -> Response:
    body = await read_body(request, CompletionBody)
    call, echoes = await while_connected(request.receive, _prepare(request, body))
    options = body.stream_options
    wants_receipt = call.context.wants_receipt or bool(options and options.include_receipt)
    usage = UsageSum(body.num_choices, wants_receipt)
    opening = [echo for echo in echoes for _ in range(body.num_choices)]
    if not body.stream:
        return await answer_object(request, call, CompletionAnswer(call.head(), opening, usage))
    with_usage = wants_receipt or bool(options and options.include_usage)
    return await answer_stream(request, call, CompletionChunks(call.head(), opening, usage, with_usage))


async def _prepare(request: Request, body: CompletionBody) -> tuple[Call, list[str]]:
    """The call, and the text that precedes the choices of each prompt. Raises an error that names the field."""
    context = call_context(request)
    warnings = check_extra(body.model_extra, COMPLETION) + stream_warnings(body)
    check_completion(body)
    output_format, format_warnings = output_format_of(body)
    warnings += format_warnings
    guardrail = guardrail_of(request)
    refuse_logprobs(guardrail, body.logprobs)
    prompts: list[Prompt] = body.prompt
    num_chars = sum(map(len, prompts))
    model = fleets_of(request).resolve(body.model, num_chars, context.tag)
    texts = [""] * len(prompts)
    if body.echo or guardrail is not None:
        texts = [await _text_of(prompt, model, context.metadata) for prompt in prompts]
    if guardrail is not None:
        texts, prompts = await _check(guardrail, texts, prompts)
    call_id = request_id_of("cmpl-", body.request_id, context)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    wires = []
    for index, prompt in enumerate(prompts):
        name = call_id if len(prompts) == 1 else f"{call_id}-{index}"
        wire = common_request(body, max_tokens, model.routed_name, name)
        _set_prompt(wire, prompt)
        wire.n = body.num_choices
        if output_format is not None:
            wire.output_format.CopyFrom(output_format)
        if body.logprobs is not None:
            wire.logprobs = body.logprobs
        wires.append(wire)
    seen = [[Message("", text)] for text in texts]
    return Call(call_id, model, wires, seen, guardrail, warnings, context), texts if body.echo else [""] * len(texts)


def _set_prompt(wire: GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        wire.text = prompt
    else:
        wire.token_ids.CopyFrom(TokenIds(ids=prompt))


async def _text_of(prompt: Prompt, model: ServedModel, metadata: tuple[tuple[str, str], ...]) -> str:
    if isinstance(prompt, str):
        return prompt
    answer = await model.router.detokenize(DetokenizeRequest(token_ids=prompt), metadata)
    return answer.text


async def _check(guardrail: Guardrail, texts: list[str], prompts: list[Prompt]) -> tuple[list[str], list[Prompt]]:
    """The texts that the guardrail returns. A prompt that it changes becomes text."""
    checked = [await check_text(guardrail, text) for text in texts]
    return checked, [
        prompt if text == before else text for prompt, before, text in zip(prompts, texts, checked, strict=True)
    ]


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
