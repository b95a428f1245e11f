"""Checks a client's GenerateRequest, tokenizes its prompt, and makes one core.request.Request for each choice.

An invalid request raises an error that names the field. Lengths are checked before values are converted: the conversion
of millions of ids is one call into C, which would block the router's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.config import MAX_MIN_INTERVAL_MS, MAX_PRIORITY, RouterConfig
from core.errors import InvalidRequest
from core.lifecycle import FinishReason
from core.model_info import ModelInfo
from core.plain_text import is_plain
from core.request import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_USER_CHARS,
    Request,
    check_stop_strings,
)
from protos import codec
from protos.unknown_fields import refuse_unknown
from router.serving.chat_prompt import check_chat
from router.serving.choice_calls import Output, open_output
from router.serving.output_formats import RequestGrammars
from router.serving.resumed_answer import check_plain, resume
from runtime.validation_threads import MAX_INLINE_BYTES
from tandem_client.stubs import inference_pb2
from text.stop_strings import StopStrings
from text.tokenizer import ModelTokenizer

MAX_REQUEST_ID_CHARS = 128
MESSAGE_BYTES = 128  # of text take as long as a message, or a call of a tool: about 60 us
TOOL_BYTES = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid request. `choices[i]` is the request of choice i; the choices differ in id and seed."""

    request_id: str
    choices: tuple[Request, ...]
    outputs: tuple[Output, ...]  # of the choices
    end: FinishReason | None  # of an answer that the client has as a whole


def work_of(wire: inference_pb2.GenerateRequest, grammars: RequestGrammars) -> int:
    """The size of `prepare` for `ValidationThreads`, in bytes. No grammar is compiled or followed on the loop."""
    size = prompt_work_of(wire)
    if size > MAX_INLINE_BYTES or (grammars.is_quick(wire) and not wire.resume):
        return size
    return size + MAX_INLINE_BYTES + 1


def prompt_work_of(wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> int:
    """The size of `tokenize_prompt`, in bytes. A template takes time for each message, however short."""
    chat = wire.chat
    size = wire.ByteSize() + MESSAGE_BYTES * len(chat.messages) + TOOL_BYTES * len(chat.tools)
    if size <= MAX_INLINE_BYTES:  # so there are few messages
        size += MESSAGE_BYTES * sum(len(message.tool_calls) for message in chat.messages)
    return size


def prepare(
    wire: inference_pb2.GenerateRequest,
    tokenizer: ModelTokenizer,
    config: RouterConfig,
    unique_id: str,
    random_seed: Callable[[], int],
    decode_limits: Sequence[int],
    grammars: RequestGrammars,
    is_late: Callable[[], bool] = lambda: False,
) -> Generation:
    """Validate and tokenize. Call it in a thread: a long prompt takes milliseconds.

    Raises `InvalidRequest` or `ModelNotFound`, and `DeadlineExceeded` once `is_late`. The ids of the choices start with
    `unique_id`. `decode_limits` are the most tokens of prompt and output that the serving decode workers hold, rising;
    empty = not known yet. The default of `max_tokens` is the room that the prompt leaves in `default_limit`, or less
    where the model says so.
    """
    info = tokenizer.info
    _check_plain_fields(wire)
    check_plain(wire, info.context_length)
    adapter = info.adapter_of(wire.model)
    token_ids = tokenize_prompt(wire, tokenizer, config)
    num_prompt_tokens = len(token_ids)
    _check_room("prompt", num_prompt_tokens, info.context_length)
    room = default_limit(num_prompt_tokens, info.context_length, decode_limits)
    grammar = grammars.grammar_of(wire)
    sampling = codec.decode_sampling(
        wire.sampling,
        wire.stop,
        wire.logprobs if wire.HasField("logprobs") else None,
        _defaults(wire, info, room - num_prompt_tokens) | {"seed": random_seed()},
        grammar,
        wire.speculation if wire.HasField("speculation") else True,
    )
    first = Request(
        f"{unique_id}.0", token_ids, num_prompt_tokens, sampling, wire.priority, wire.cache_salt, adapter,
        tenant=wire.user or wire.cache_salt,
    )  # fmt: skip
    first.validate_for(info.vocab_size, info.context_length)
    first.packed_token_ids()  # here, in a thread, and not on the router's loop
    choices = tuple(first.for_choice(choice, f"{unique_id}.{choice}") for choice in range(wire.n or 1))
    request_id = wire.request_id or unique_id
    stop_strings = StopStrings(wire.stop.stop_strings)
    outputs = tuple(open_output(wire, choice, request_id, tokenizer, stop_strings) for choice in choices)
    end = resume(wire, first, outputs[0], tokenizer, grammars, is_late) if wire.resume else None
    return Generation(request_id, choices, outputs, end)


def default_limit(num_prompt_tokens: int, context_length: int, decode_limits: Sequence[int]) -> int:
    """Most tokens of prompt and output of a request without `max_tokens`: what the smallest decode worker holds that
    leaves the output at least half of the room that the largest one leaves.

    The workers of a fleet often differ by some blocks. The largest limit would send each such request to one worker.
    """
    limits = [min(context_length, limit) for limit in decode_limits] or [context_length]
    half = (limits[-1] - num_prompt_tokens) / 2
    return next(limit for limit in limits if limit - num_prompt_tokens >= half or limit == limits[-1])


def _defaults(wire: inference_pb2.GenerateRequest, info: ModelInfo, room: int) -> dict[str, float]:
    """Of the sampling, by field: those of the model, and as many tokens as there is room for."""
    sampling = dict(info.default_sampling)
    most = max(sampling.get("max_tokens", room), wire.stop.min_tokens)
    return sampling | {"max_tokens": max(1, min(most, room))}


def tokenize_prompt(
    wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    tokenizer: ModelTokenizer,
    config: RouterConfig,
) -> tuple[int, ...]:
    """Token ids of the prompt, given as text, chat or token ids. Raises `InvalidRequest`."""
    refuse_unknown(wire)
    kind = wire.WhichOneof("prompt")
    if kind is None:
        forms = [field.name for field in wire.DESCRIPTOR.oneofs_by_name["prompt"].fields]
        raise InvalidRequest("prompt", f"one of {', '.join(forms)} must be set")
    chosen = wire.parse_special_tokens if wire.HasField("parse_special_tokens") else None
    salt = wire.cache_salt if isinstance(wire, inference_pb2.GenerateRequest) else ""
    if kind == "token_ids":
        assert isinstance(wire, inference_pb2.GenerateRequest)
        _check_room(kind, len(wire.token_ids.ids), tokenizer.info.context_length)
        token_ids = tuple(wire.token_ids.ids)
    elif kind == "text":
        _check_length("text", wire.text, config.max_prompt_chars)
        parse_special = True if chosen is None else chosen
        token_ids = tuple(tokenizer.encode(wire.text, True, parse_special, salt)) if wire.text else ()
    else:
        chat = check_chat(wire.chat, tokenizer, config.max_prompt_chars)
        token_ids = tuple(tokenizer.encode_chat(chat, bool(chosen), salt))
    if not token_ids:
        raise InvalidRequest(kind, "must have at least 1 token, has 0")
    return token_ids


def _check_plain_fields(wire: inference_pb2.GenerateRequest) -> None:
    _check_length("request_id", wire.request_id, MAX_REQUEST_ID_CHARS)
    if not is_plain(wire.request_id):
        raise InvalidRequest("request_id", "must have no control characters")
    _check_length("cache_salt", wire.cache_salt, MAX_CACHE_SALT_CHARS)
    _check_length("user", wire.user, MAX_USER_CHARS)
    if wire.n > MAX_CHOICES:
        raise InvalidRequest("n", f"must be in [1, {MAX_CHOICES}], is {wire.n}")
    if abs(wire.priority) > MAX_PRIORITY:
        raise InvalidRequest("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], is {wire.priority}")
    if wire.min_interval_ms > MAX_MIN_INTERVAL_MS:
        raise InvalidRequest("min_interval_ms", f"must be in [0, {MAX_MIN_INTERVAL_MS}], is {wire.min_interval_ms}")
    check_stop_strings("stop_strings", wire.stop.stop_strings)


def _check_room(field: str, num_tokens: int, context_length: int) -> None:
    if num_tokens >= context_length:
        raise InvalidRequest(
            field,
            f"must have at most {context_length - 1} tokens to leave room for output in the context of "
            f"{context_length} tokens, has {num_tokens}",
        )


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(field, f"must have at most {limit} characters, has {len(text)}")
