"""An answer that another router has begun: the tokens that the client brings are checked, and the text goes on.

The tokens are those of one output, so this router could have drawn each of them: they are in the vocabulary, the format
of the output allows them, and only the last one may end the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from core.errors import InvalidRequest
from core.lifecycle import FinishReason
from core.request import Request
from router.serving.choice_calls import Output
from router.serving.output_formats import RequestGrammars
from tandem_client.stubs import inference_pb2
from text.tokenizer import ModelTokenizer

FIELD = "resume"


def check_plain(wire: inference_pb2.GenerateRequest, context_length: int) -> None:
    """Check before any id is converted. Raises `InvalidRequest`."""
    if wire.resume and wire.n > 1:
        raise InvalidRequest(FIELD, f"needs n = 1, n is {wire.n}: resume choice i as a call of its own, with seed + i")
    if len(wire.resume) >= context_length:
        raise InvalidRequest(
            FIELD, f"must have fewer ids than the context of {context_length} tokens, has {len(wire.resume)}"
        )


def resume(
    wire: inference_pb2.GenerateRequest,
    request: Request,
    output: Output,
    tokenizer: ModelTokenizer,
    grammars: RequestGrammars,
    is_late: Callable[[], bool],
) -> FinishReason | None:
    """Bring `output` behind the tokens of the client. Returns how they end the answer; None: it goes on.

    Raises `InvalidRequest` for tokens that no answer to this request begins with, `DeadlineExceeded` once `is_late`.
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
    text, calls = output
    known, num_used = text.push(token_ids)
    if num_used < len(token_ids):
        raise InvalidRequest(FIELD, f"has ids behind index {num_used - 1}, where a stop string ended the answer")
    if calls is not None:
        calls.push(known)
    if text.stop_match or token_ids[-1] in stop_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) == sampling.max_tokens else None
