"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refused
from gateway.fleets import ServedModel, fleets_of
from gateway.formats.completion import CompletionChunks
from gateway.guardrails import Guardrail, Message
from gateway.http.connection import while_connected
from gateway.prompt_guardrail import check_text, refuse_tokens
from gateway.routes.answering import Call, Given, answer
from gateway.routes.calls import beside_the_loop, call_context, read_body, request_id_of
from gateway.schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody, Prompt, check_completion
from gateway.schemas.fields import COMPLETION, check_extra
from gateway.schemas.output_format import format_field, output_format_of
from gateway.schemas.sampling import check_answer, check_echo, common_request, stream_warnings
from tandem_client.stubs.inference_pb2 import DetokenizeRequest, GenerateRequest, TokenIds

MAX_COMMON_BYTES = 64 * 1024  # of a request without its prompt


async def completions(request: Request) -> Response:
    body, (given, prompts) = await read_body(request, CompletionBody, _given)
    call, echoes = await while_connected(request.receive, _prepare(request, body, given, prompts))
    opening = [echo for echo in echoes for _ in range(body.num_choices)]
    form = CompletionChunks(call.head(body.stream_options), opening)
    return await answer(request, call, form, body.stream)


def _given(body: CompletionBody) -> tuple[Given, list[str | TokenIds]]:
    """The request, and its prompts. Call it in a thread. Raises `ApiError`."""
    warnings = check_extra(body.model_extra, COMPLETION) + stream_warnings(body)
    check_completion(body)
    output_format, format_warnings = output_format_of(body)
    prompts: list[Prompt] = body.prompt
    wires = [prompt if isinstance(prompt, str) else TokenIds(ids=prompt) for prompt in prompts]
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    common = common_request(body, max_tokens, output_format, body.logprobs)
    return Given(common, sum(map(len, prompts)), warnings + format_warnings), wires


async def _prepare(
    request: Request, body: CompletionBody, given: Given, prompts: list[str | TokenIds]
) -> tuple[Call, list[str]]:
    """The call, and the text that precedes the choices of each prompt. Raises an error that names the field."""
    context, common = call_context(request), given.wire
    guardrail: Guardrail | None = request.app.state.guardrail
    refuse_tokens(guardrail, common)
    model = fleets_of(request).resolve(body.model, given.num_chars, context.tag)
    if not body.stream:
        check_answer(common, len(prompts), model.info.context_length, "logprobs")
    texts = [""] * len(prompts)
    if body.echo or guardrail is not None:
        texts = []
        for prompt in prompts:
            texts.append(await _text_of(request, prompt, model, context.metadata))
            if body.echo:
                check_echo(body.num_choices, sum(map(len, texts)))
    if guardrail is not None:
        texts, prompts = await _check(guardrail, texts, prompts)
    common.model, common.request_id = model.routed_name, request_id_of("cmpl-", body.request_id, context)
    wires = _requests(common, prompts)
    seen = [[Message("", text)] for text in texts]
    names = {"output_format": format_field(body)}
    call = Call(common.request_id, model, wires, seen, guardrail, given.warnings, context, names)
    return call, texts if body.echo else [""] * len(texts)


def _requests(common: GenerateRequest, prompts: Sequence[str | TokenIds]) -> list[GenerateRequest]:
    """One request for each prompt. Raises `ApiError`."""
    if len(prompts) > 1 and common.ByteSize() > MAX_COMMON_BYTES:  # each request has a copy
        raise refused("prompt", f"must be one prompt if the other fields have over {MAX_COMMON_BYTES} bytes")
    wires = []
    for index, prompt in enumerate(prompts):
        wire = GenerateRequest()
        wire.CopyFrom(common)
        if len(prompts) > 1:
            wire.request_id = f"{common.request_id}-{index}"
        if isinstance(prompt, str):
            wire.text = prompt
        else:
            wire.token_ids.CopyFrom(prompt)
        wires.append(wire)
    return wires


async def _text_of(
    request: Request, prompt: str | TokenIds, model: ServedModel, metadata: tuple[tuple[str, str], ...]
) -> str:
    if isinstance(prompt, str):
        return prompt
    wire = await beside_the_loop(request, prompt.ByteSize(), DetokenizeRequest, token_ids=prompt.ids)
    return (await model.router.detokenize(wire, metadata)).text


async def _check(
    guardrail: Guardrail, texts: list[str], prompts: Sequence[str | TokenIds]
) -> tuple[list[str], list[str | TokenIds]]:
    """The texts that the guardrail returns. A prompt that it changes becomes text."""
    checked = [await check_text(guardrail, text) for text in texts]
    return checked, [
        prompt if text == before else text for prompt, before, text in zip(prompts, texts, checked, strict=True)
    ]


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
