"""The part that the requests of all generating routes share: sampling, the end of the output, and vLLM's extra fields.

The schemas check the types, and what the gRPC messages could not carry. The router checks the ranges.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from core.errors import quoted
from core.request import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_USER_CHARS,
)
from gateway.errors import refused
from gateway.schemas.base import ModelName, Schema, items
from gateway.schemas.fields import check_extra
from gateway.schemas.output_format import FormatFields
from tandem_client.stubs.inference_pb2 import GenerateRequest, OutputFormat, SamplingParams, StopConditions

UINT32 = 2**32 - 1
MAX_ANSWER_LOGPROBS = 2**20  # log-probabilities of an answer in one piece, 80 MB of JSON; beyond: status 400
MAX_ANSWER_TOKEN_IDS = 2**23  # token ids of the output of an answer in one piece, 60 MB of JSON; beyond: status 400

# Limit: characters of the prompts that the choices of an answer repeat (`echo`), 40 ms to encode; beyond: status 400
MAX_ECHO_CHARS = 2**21


def _bias_token(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= UINT32):
        raise ValueError(f"keys must be token ids, one is {quoted(key)}")
    return key


BiasedToken = Annotated[str, AfterValidator(_bias_token)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=UINT32)]


class GenerationFields(Schema):
    """null means "not set" for every field."""

    model: ModelName | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = None
    # vLLM's fields
    top_k: Annotated[int, Field(ge=-1, le=UINT32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[TokenId], items(MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    speculation: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None


class StreamOptions(Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_receipt: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads chunks against eavesdroppers; here it has no effect


class SamplingFields(GenerationFields, FormatFields):
    """The further fields of completions and chat completions."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], items(MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[BiasedToken, float], items(MAX_LOGIT_BIAS)] | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # of vLLM

    @property
    def num_choices(self) -> int:
        return self.n or 1


def sampling_of(body: GenerationFields) -> SamplingParams:
    given: dict[str, Any] = {
        name: getattr(body, name, None)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        )
    }  # fmt: skip
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 of vLLM: all
    if given["seed"] is not None:  # -1 of vLLM: a random one
        given["seed"] = None if given["seed"] == -1 else given["seed"] & MAX_SEED
    sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    for key, bias in (getattr(body, "logit_bias", None) or {}).items():
        sampling.logit_bias[int(key)] = bias
    return sampling


def stop_of(body: GenerationFields, max_tokens: int | None) -> StopConditions:
    stop = getattr(body, "stop", None)
    return StopConditions(
        stop_strings=[stop] if isinstance(stop, str) else stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
    )


def common_request(
    body: GenerationFields, max_tokens: int | None, output_format: OutputFormat | None, num_logprobs: int | None = None
) -> GenerateRequest:
    """The gRPC request without its prompt, its model and its id."""
    return GenerateRequest(
        sampling=sampling_of(body),
        stop=stop_of(body, max_tokens),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        user=body.user or "",
        n=getattr(body, "n", None) or 1,
        output_format=output_format,
        logprobs=num_logprobs,
        speculation=body.speculation,
        return_prompt_token_ids=bool(getattr(body, "return_token_ids", None)),
    )


def check_answer(wire: GenerateRequest, num_prompts: int, context_length: int, field: str) -> None:
    """Raises `ApiError` for more log-probabilities, which `field` asks for, or more token ids than an answer in one
    piece may have."""
    num_tokens = num_prompts * wire.n * min(wire.stop.max_tokens or context_length, context_length)
    num_logprobs = num_tokens * (wire.logprobs + 1)
    if wire.HasField("logprobs") and num_logprobs > MAX_ANSWER_LOGPROBS:
        message = (
            f"an answer without stream has at most {MAX_ANSWER_LOGPROBS} log-probabilities; choices x max_tokens x "
            f"({field} + 1) is {num_logprobs}: set a lower max_tokens, or stream"
        )
        raise refused(field, message)
    if wire.return_prompt_token_ids and num_tokens > MAX_ANSWER_TOKEN_IDS:
        message = (
            f"an answer without stream has at most {MAX_ANSWER_TOKEN_IDS} ids; choices x max_tokens is {num_tokens}"
        )
        raise refused("return_token_ids", f"{message}: set a lower max_tokens, or stream")


def check_echo(num_choices: int, num_chars: int) -> None:
    """`num_chars`: of all prompts. Raises `ApiError` for more text than an answer may repeat."""
    count = num_choices * num_chars
    if count > MAX_ECHO_CHARS:
        message = f"an answer repeats at most {MAX_ECHO_CHARS} characters; n x those of the prompts is {count}"
        raise refused("echo", message)


def stream_warnings(body: SamplingFields) -> list[str]:
    """Warnings about options of the stream. Raises `ApiError` for an unknown one."""
    options = body.stream_options
    if options is None:
        return []
    if not body.stream:
        raise refused("stream_options", "needs stream to be true")
    warnings = check_extra(options.model_extra, {}, "stream_options.")
    if options.continuous_usage_stats:
        warnings.append("stream_options.continuous_usage_stats has no effect: usage comes with the last chunk")
    return warnings
