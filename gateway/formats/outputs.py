"""The words that all formats of answers share: ids, finish reasons, log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_client.stubs.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Finished, TokenLogprobs

FINISH_REASONS = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}
MIN_LOGPROB = -9999.0  # JSON has no infinity, and no NaN: `max` takes its first argument in place of one


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every part of one answer repeats, and the options of the client for the answer."""

    id: str
    model: str
    created: int  # seconds since the epoch
    eos_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    names_tool: bool = False  # `tool_choice` names the tool that is called
    with_token_ids: bool = False
    num_choices: int = 1  # of each prompt
    with_usage: bool = False  # a stream ends with the token counts
    with_receipt: bool = False

    def finish_reason(self, finished: Finished) -> str:
        """ "tool_calls" if the model chose to call a tool, and its call is complete. A reason that only a later router
        knows is "stop": clients know no other words."""
        reason = FINISH_REASONS.get(finished.finish_reason, "stop")
        return "tool_calls" if reason == "stop" and finished.num_tool_calls and not self.names_tool else reason

    def stop_reason(self, finished: Finished) -> str | int | None:
        """As vLLM has it: the stop string or the stop token id that ended the choice, null for the end of sequence."""
        match = finished.stop_match
        if not match or match in self.stop_strings:
            return match or None
        return None if int(match) in self.eos_token_ids else int(match)


def token_text(token: bytes) -> str:
    """The text of a token. A part of a character is named by its bytes, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat completion."""

    def entry(token: bytes, logprob: float) -> dict[str, Any]:
        return {"token": token_text(token), "logprob": max(MIN_LOGPROB, logprob), "bytes": list(token)}

    return [
        entry(found.token, found.logprob) | {"top_logprobs": [entry(top.token, top.logprob) for top in found.top]}
        for found in entries
    ]


class CompletionLogprobs:
    """`logprobs` of one choice of a completion: four columns. `offset`: characters of the text before."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for found in entries:
            text = token_text(found.token)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(max(MIN_LOGPROB, found.logprob))
            top = {token_text(item.token): max(MIN_LOGPROB, item.logprob) for item in found.top}
            columns["top_logprobs"].append(top | {text: max(MIN_LOGPROB, found.logprob)})
            columns["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(found.token))
        return columns
