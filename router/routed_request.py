"""The state of one request inside the router, and of one attempt (dispatch) to serve it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.block_hash import PromptHashes
from core.errors import QueueFull, TandemError, TransferFailed
from core.lifecycle import FinishReason, RequestPath, Timeline
from core.request import Request
from core.sequence import Sequence
from core.step import SampledToken
from router.events import DecodeResult, IndexedTokens, Outcome, PrefillResult
from router.policy import Candidate


def dispatch_id_of(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def request_id_of(dispatch_id: str) -> str:
    return dispatch_id.rpartition("#")[0]


@dataclass(slots=True, eq=False)
class Dispatch:
    """One attempt: a decode call and, on the disaggregated path, a prefill call beside it."""

    dispatch_id: str
    candidate: Candidate
    prefill_open: bool  # the call has not returned
    decode_open: bool = True
    prefill: PrefillResult | None = None
    decode: DecodeResult | None = None


@dataclass(slots=True, eq=False)
class RoutedRequest:
    request: Request
    arrival: int  # order of arrival
    arrived_at: float
    deadline: float
    timeline: Timeline
    hashes: PromptHashes | None = None  # of resumed(); None until the first attempt to dispatch it
    delivered: list[SampledToken] = field(default_factory=list)  # by output index
    early_tokens: dict[int, SampledToken] = field(default_factory=dict)  # by output index; an earlier index is missing
    dispatch: Dispatch | None = None  # the current attempt; None while queued
    last_dispatch: Dispatch | None = None
    attempts: int = 0
    attempts_without_token: int = 0  # since the last delivered token
    queued_at: float = 0.0
    not_before: float = 0.0  # earliest time of the next dispatch
    failed_workers: frozenset[str] = frozenset()
    held_choices: list[RoutedRequest] = field(default_factory=list)  # other choices, which wait for the first token
    last_error: str = ""
    first_token_at: float | None = None
    has_streamed: bool = False  # the client has tokens of this choice or of another choice of the same call

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """Order of dispatch: lower priority value, then earlier arrival."""
        return (self.request.priority, self.arrival)

    def resumed(self) -> Request:
        """The request for the next worker: the prompt, then the delivered tokens."""
        if not self.delivered:
            return self.request
        delivered = tuple(token.token_id for token in self.delivered)
        return replace(self.request, token_ids=self.request.token_ids + delivered)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """The finish reason that the delivered tokens alone imply; None if the request is not complete."""
        if not self.delivered:
            return None
        token_ids = [*self.request.token_ids, *(token.token_id for token in self.delivered)]
        return Sequence(self.request, 0, token_ids=token_ids).finish_reason_after(token_ids[-1], eos_token_ids)

    def outcome(self, reason: FinishReason) -> Outcome:
        dispatch = self.last_dispatch
        assert dispatch is not None
        assert self.first_token_at is not None, "a request cannot finish without a token"
        cached = dispatch.prefill or dispatch.decode
        return Outcome(
            finish_reason=reason,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=len(self.delivered),
            cached_tokens=0 if cached is None else min(cached.cached_tokens, self.request.num_prompt_tokens),
            path=dispatch.candidate.path if self.attempts == 1 else RequestPath.RECOMPUTED,
            attempts=self.attempts,
            timeline=self.timeline,
            candidate=dispatch.candidate,
            first_token_s=self.first_token_at - self.arrived_at,
            prefill=dispatch.prefill,
            decode=dispatch.decode,
        )

    @property
    def no_worker_message(self) -> str:
        last = f"; the last attempt failed: {self.last_error}" if self.last_error else ""
        return f"no decode worker is serving{last}"

    def accept(self, tokens: IndexedTokens) -> int:
        """Accept (index, token) pairs in any order, repeated or not. Returns the first index newly in `delivered`.

        Ignores a token without the log-probabilities that the client asked for: the hand-off brings the first token to
        the decode worker without them, and the answer of the prefill worker has them.
        """
        needs_logprob = self.request.sampling.num_logprobs is not None
        for index, token in tokens:
            if index >= len(self.delivered) and not (needs_logprob and token.logprob is None):
                self.early_tokens.setdefault(index, token)
        first = len(self.delivered)
        while len(self.delivered) in self.early_tokens:
            self.delivered.append(self.early_tokens.pop(len(self.delivered)))
        return first


def workers_to_avoid(error: TandemError, worker_id: str, candidate: Candidate) -> set[str]:
    """The workers that the next attempt avoids after `error`, which `worker_id` returned.

    None after a full queue. Both workers after a failed hand-off, because either may have caused the failure.
    """
    if isinstance(error, QueueFull):
        return set()
    if isinstance(error, TransferFailed) and candidate.prefill_worker is not None:
        return {candidate.prefill_worker, candidate.decode_worker}
    return {worker_id}
