"""An answer that another router has begun: the tokens that the client brings are checked, and the text goes on.

The tokens are those of one output, so this router could have drawn each of them: they are in the vocabulary, the format
of the output allows them, and only the last one may end the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.errors import InvalidRequest
from core.lifecycle import FinishReason
from core.request import Request
from router.serving.choice_calls import ChoiceCalls, calls_of, can_call
from router.serving.output_formats import RequestGrammars
from tandem_client.stubs import inference_pb2
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer

FIELD = "resume"


@dataclass(frozen=True, slots=True)
class ResumedAnswer:
    token_ids: tuple[int, ...]
    text: TextStream  # behind these tokens
    calls: ChoiceCalls | None  # behind these tokens
    end: FinishReason | None  # None: the answer goes on


def check_plain(wire: inference_pb2.GenerateRequest, context_length: int) -> None:
    """Check before any id is converted. Raises `InvalidRequest`."""
    if wire.resume and wire.n > 1:
        raise InvalidRequest(FIELD, f"needs n = 1, n is {wire.n}: resume choice i as a call of its own, with seed + i")
    if len(wire.resume) >= context_length:
        raise InvalidRequest(
            FIELD, f"must have fewer ids than the context of {context_length} tokens, has {len(wire.resume)}"
        )


def read_resumed(
    wire: inference_pb2.GenerateRequest,
    request: Request,
    client_request_id: str,
    tokenizer: ModelTokenizer,
    grammars: RequestGrammars,
    stop_strings: StopStrings,
    is_late: Callable[[], bool],
) -> ResumedAnswer:
    """Raises `InvalidRequest` for tokens that no answer to this request begins with.

    Raises `DeadlineExceeded` once `is_late`.
    """
    token_ids, vocab_size, sampling = tuple(wire.resume), tokenizer.info.vocab_size, request.sampling
    if len(token_ids) > sampling.max_tokens:
        raise InvalidRequest(FIELD, f"must have at most max_tokens ({sampling.max_tokens}) ids, has {len(token_ids)}")
    if max(token_ids) >= vocab_size:
        raise InvalidRequest(FIELD, f"token id {max(token_ids)} is outside the vocabulary [0, {vocab_size})")
    stop_tokens = sampling.stop_tokens(tokenizer.eos_token_ids)
    for index, token_id in enumerate(token_ids[:-1]):
        if token_id in stop_tokens:
            raise InvalidRequest(FIELD, f"has ids behind index {index}, where token {token_id} ended the answer")
    num_accepted = grammars.num_accepted(sampling.grammar, token_ids, is_late)
    if num_accepted < len(token_ids):
        raise InvalidRequest(FIELD, f"token {token_ids[num_accepted]} at index {num_accepted} breaks the output format")
    detokenizer = tokenizer.detokenizer(can_call(wire, tokenizer.tool_format))
    text = TextStream(detokenizer, stop_strings, sampling.min_tokens)
    known, num_used = text.push(token_ids)
    if num_used < len(token_ids):
        raise InvalidRequest(FIELD, f"has ids behind index {num_used - 1}, where a stop string ended the answer")
    calls = calls_of(wire, tokenizer.tool_format, request, client_request_id)
    if calls is not None:
        calls.push(known)
    if text.stop_match or token_ids[-1] in stop_tokens:
        return ResumedAnswer(token_ids, text, calls, FinishReason.STOP)
    end = FinishReason.LENGTH if len(token_ids) == sampling.max_tokens else None
    return ResumedAnswer(token_ids, text, calls, end)
