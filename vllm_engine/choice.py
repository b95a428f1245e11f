"""One choice of a Generate call: its tokens, its end, and its messages.

Tokens that arrive while the router does not read wait here, at most max_tokens of them, and leave as one message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2

from core.errors import TandemError
from core.lifecycle import FinishReason
from core.request import Request
from core.step import SampledToken
from text.text_stream import TextStream
from vllm_engine.roles import Progress

ABORTED = "abort"


@dataclass(slots=True, eq=False)
class Choice:
    index: int
    request: Request
    text: TextStream | None  # None without stop strings
    changed: asyncio.Event  # of the call
    first_token: SampledToken | None = None  # as the prefill worker drew it: a hand-off carries only its id
    prefill_cached_tokens: int = 0  # as the prefill worker reported
    tokens: list[SampledToken] = field(default_factory=list)
    num_taken: int = 0  # of the tokens, in a chunk
    cached_tokens: int = 0
    finish_reason: str = ""  # empty until the end
    error: TandemError | None = None
    ended_by_machine: bool = False

    @property
    def ended(self) -> bool:
        return bool(self.finish_reason) or self.error is not None

    @property
    def has_chunk(self) -> bool:
        return self.num_taken < len(self.tokens)

    def take(self, progress: Progress) -> bool:
        """Returns True if the tokens complete a stop string: the sequence must end."""
        self.ended_by_machine |= progress.finish_reason is not None or progress.error is not None
        if self.ended:
            return False
        self.changed.set()
        self.error = progress.error
        for token in progress.tokens:
            if not self.tokens and self.first_token is not None:
                token = self.first_token
            self.tokens.append(token)
            if self.text is not None:
                self.text.push([token.token_id])
                if self.text.stop_match:
                    self.finish_reason = FinishReason.STOP.value
                    return not self.ended_by_machine
        if progress.finish_reason is not None:
            self.finish_reason = progress.finish_reason.value
            self.cached_tokens = max(progress.cached_tokens, self.prefill_cached_tokens)
        return False

    def abort(self) -> None:
        if not self.ended:
            self.finish_reason = ABORTED
            self.changed.set()

    def chunk(self) -> vllm_engine_pb2.GenerateResponse:
        """The tokens that are in no chunk yet."""
        new, self.num_taken = self.tokens[self.num_taken :], len(self.tokens)
        return vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=[token.token_id for token in new],
                prompt_tokens=self.request.num_prompt_tokens,
                completion_tokens=self.num_taken,
                cached_tokens=self.prefill_cached_tokens,
                output_logprobs=self._logprobs(new),
                index=self.index,
            )
        )

    def complete(self, kv_transfer_params: str) -> vllm_engine_pb2.GenerateResponse:
        """The last message, with all tokens."""
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=[token.token_id for token in self.tokens],
            finish_reason=self.finish_reason,
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            output_logprobs=self._logprobs(self.tokens),
            index=self.index,
        )
        if kv_transfer_params:
            complete.kv_transfer_params_json = kv_transfer_params
        if self.text is not None and self.text.stop_match:
            complete.matched_stop_str = self.text.stop_match
        elif self.finish_reason == FinishReason.STOP.value:
            last = self.tokens[-1].token_id
            if last in self.request.sampling.stop_token_ids:
                complete.matched_token_id = last
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    def _logprobs(self, tokens: list[SampledToken]) -> vllm_engine_pb2.OutputLogProbs | None:
        if self.request.sampling.num_logprobs is None:
            return None
        return vllm_engine_pb2.OutputLogProbs(
            token_logprobs=[token.logprob or 0.0 for token in tokens],
            token_ids=[token.token_id for token in tokens],
            top_logprobs=[
                vllm_engine_pb2.TopLogProbs(
                    values=[value for _, value in token.top_logprobs],
                    token_ids=[token_id for token_id, _ in token.top_logprobs],
                )
                for token in tokens
            ],
        )
