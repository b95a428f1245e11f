"""The state of one request inside the router, and of one attempt (dispatch) to serve it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from core.block_hash import PromptHashes
from core.errors import QueueFull, TandemError, TransferFailed, WorkerDrains
from core.handoff import TransferId
from core.lifecycle import FinishReason, MoveReason, RequestPath, Stage, Timeline
from core.request import Request
from core.scheduling.sequence import Sequence
from core.step import SampledToken
from router.requests.events import Attempt, DecodeResult, Deliver, Outcome, PrefillResult, Promise, predicted_prefill_s
from router.routing.question import Candidate

MAX_ATTEMPTS_KEPT = 16  # attempts of a request in its trace; beyond: the oldest is dropped

EarlyToken = tuple[int, SampledToken | None]  # id, and the token with its log-probabilities if the request has them


def dispatch_id_of(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def request_id_of(dispatch_id: str) -> str:
    return dispatch_id.rpartition("#")[0]


@dataclass(slots=True, eq=False)
class Dispatch:
    """One attempt: a decode call and, on the disaggregated path, a prefill call beside it; or a move, which keeps the
    candidate of its source but for the decode worker."""

    dispatch_id: str
    candidate: Candidate
    call: int  # number of the decode call
    first_index: int  # of the first token of this attempt
    prefill_open: bool  # the call has not returned
    compared: Items[Candidate]  # with `candidate`
    started_at: float
    transfer_id: TransferId | None = None  # of the hand-off; None: the decode worker computes the prompt
    decode_open: bool = True
    prefill: PrefillResult | None = None
    decode: DecodeResult | None = None
    source: str | None = None  # worker whose KV the decode worker reads; None: it computes the prompt
    end_index: int | None = None  # a move's source: it sends no token from here on; None: not known


@dataclass(slots=True, eq=False)
class Move:
    """The current dispatch is to go on at another decode worker."""

    target: Dispatch
    reason: MoveReason
    first_index: int | None = None  # the source has handed over: it samples no token from here on


@dataclass(slots=True, eq=False)
class RoutedRequest:
    request: Request
    arrival: int  # order of arrival
    arrived_at: float
    deadline: float
    timeline: Timeline
    hashes: PromptHashes | None = None  # of resumed(); None until the first attempt to dispatch it
    delivered: list[int] = field(default_factory=list)  # token ids, by output index
    num_taken: int = 0  # of `delivered`, in a Deliver
    new_logprobs: list[SampledToken] = field(default_factory=list)  # of delivered[num_taken:], if the request has them
    early_tokens: dict[int, EarlyToken] = field(default_factory=dict)  # by output index; an earlier index is missing
    dispatch: Dispatch | None = None  # the current attempt; None while queued
    last_dispatch: Dispatch | None = None
    move: Move | None = None  # of `dispatch`
    left: list[Dispatch] = field(default_factory=list)  # from which `dispatch` has moved, oldest first
    num_dispatches: int = 0  # attempts and moves, for their ids
    num_moves: int = 0
    num_room_moves: int = 0  # ... for lack of room
    earlier: list[DecodeResult] = field(default_factory=list)  # of `left`, as far as they have returned
    num_lost_tokens: int = 0  # computed before the newest failure
    num_recomputed_tokens: int = 0
    attempts: int = 0
    attempts_without_token: int = 0  # since the last delivered token
    queued_at: float = 0.0
    not_before: float = 0.0  # earliest time of the next dispatch
    failed_workers: frozenset[str] = frozenset()  # the next attempt avoids them
    held_choices: list[RoutedRequest] = field(default_factory=list)  # other choices, which wait for its decode worker
    preferred_worker: str = ""  # that has the KV of the prompt, which its reports may not say yet
    last_error: str = ""
    first_token_at: float | None = None
    predicted_first_token_s: float = 0.0  # from arrival; by the last dispatch before the first token
    ended_attempts: deque[Attempt] = field(default_factory=lambda: deque(maxlen=MAX_ATTEMPTS_KEPT))
    promise: Promise | None = None  # of the last dispatch
    kv_block_seconds: float = 0.0  # on workers, over all attempts that have reported them
    unreported_since: float = 0.0  # in the current attempt: no decode worker has reported them from here on
    has_streamed: bool = False  # the client has tokens of this choice or of another choice of the same call
    num_resumed: int = field(init=False)  # of `delivered`, by another router
    needs_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_resumed = self.num_taken = len(self.delivered)
        self.has_streamed = bool(self.delivered)
        if self.delivered:
            self.num_lost_tokens = self.request.num_prompt_tokens + self.num_resumed
        self.needs_logprobs = self.request.sampling.num_logprobs is not None

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
        return replace(self.request, token_ids=self.request.token_ids + tuple(self.delivered))

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """The finish reason that the delivered tokens alone imply; None if the request is not complete."""
        if not self.delivered:
            return None
        token_ids = [*self.request.token_ids, *self.delivered]
        return Sequence(self.request, 0, token_ids=token_ids).finish_reason_after(token_ids[-1], eos_token_ids)

    def record_attempt(self, error: TandemError | None, now: float) -> None:
        """Note the end of the current attempt, if there is one, for the trace."""
        if self.dispatch is not None:
            self.record_dispatch(self.dispatch, error, now)

    def record_dispatch(self, dispatch: Dispatch, error: TandemError | None, now: float) -> None:
        code, text = ("", "") if error is None else (error.code.value, str(error))
        self.ended_attempts.append(
            Attempt(
                self.attempts, dispatch.candidate, dispatch.compared, dispatch.started_at, now, dispatch.prefill,
                dispatch.decode, code, text,
            )
        )  # fmt: skip

    def outcome(self, reason: FinishReason, slo_itl_s: float = 0.0) -> Outcome:
        dispatch = self.last_dispatch
        assert dispatch is not None
        assert self.first_token_at is not None, "a request cannot finish without a token"
        results = [*self.earlier] if dispatch.decode is None else [*self.earlier, dispatch.decode]
        decode = joined(results) if results else None
        computed = dispatch.prefill if dispatch.candidate.prefill_worker else decode
        candidate = dispatch.candidate
        # Without the answer of the worker that computed the prompt, after a stop string or a fault: as predicted.
        cached_tokens = candidate.cached_tokens if computed is None else computed.cached_tokens
        read_tokens = candidate.read.num_tokens if computed is None else computed.read_tokens or 0
        num_prompt_tokens = self.request.num_prompt_tokens
        return Outcome(
            finish_reason=reason,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=len(self.delivered),
            cached_tokens=min(cached_tokens, num_prompt_tokens),
            path=self._path(dispatch),
            attempts=self.attempts,
            timeline=self.timeline,
            candidate=candidate,
            first_token_s=self.first_token_at - self.arrived_at,
            predicted_first_token_s=self.predicted_first_token_s,
            prefill=dispatch.prefill,
            decode=decode,
            promise=self.promise,
            kv_block_seconds=self.kv_block_seconds,
            slo_itl_s=slo_itl_s,
            num_moves=self.num_moves,
            num_resumed_tokens=self.num_resumed,
            recomputed_tokens=self.num_recomputed_tokens,
            read_tokens=min(read_tokens, num_prompt_tokens),
        )

    def _path(self, dispatch: Dispatch) -> RequestPath:
        if self.attempts > 1:
            return RequestPath.RECOMPUTED
        return RequestPath.MIGRATED if self.num_moves else dispatch.candidate.path

    def may_retry(self, error: TandemError, max_attempts: int) -> bool:
        """Whether another attempt may follow the current one, which failed with `error`.

        A request that has streamed tokens waits for room until its deadline, and so does one that no worker has begun.
        """
        waits = isinstance(error, WorkerDrains) or (isinstance(error, QueueFull) and self.has_streamed)
        return error.retryable and (waits or self.attempts_without_token < max_attempts)

    def note_failed(self, error: TandemError, worker_id: str) -> None:
        """The current attempt has failed at this worker. Count the tokens that it may have computed."""
        dispatch = dispatch_of(self)
        if isinstance(error, WorkerDrains):  # the worker has not begun
            self.attempts -= 1
            self.attempts_without_token -= 1
        self.failed_workers |= failed_workers(error, worker_id, dispatch)
        if dispatch.prefill is not None and dispatch.candidate.prefill_worker not in self.failed_workers:
            self.preferred_worker = dispatch.candidate.prefill_worker or ""
        self.last_error = str(error)
        self.early_tokens.clear()
        has_computed = self.delivered or dispatch.prefill is not None or dispatch.decode is not None
        self.num_lost_tokens = len(self.request.token_ids) + len(self.delivered) if has_computed else 0
        self.earlier.clear()

    def note_decoded(self, dispatch: Dispatch, result: DecodeResult) -> None:
        """The decode call of the current attempt has returned."""
        dispatch.decode = result
        self.kv_block_seconds += result.kv_block_seconds
        self.num_recomputed_tokens += result.recomputed_tokens
        if dispatch.transfer_id is None:
            self.note_recomputed(result.cached_tokens)

    def note_recomputed(self, cached_tokens: int) -> None:
        """A worker has computed prompt and delivered tokens, but for `cached_tokens`."""
        self.num_recomputed_tokens += max(0, self.num_lost_tokens - cached_tokens)
        self.num_lost_tokens = 0

    def unreported_block_seconds(self, block_size: int) -> float:
        """An estimate for a decode call that the router has cancelled, because a stop string ended the choice, and for
        the prompt, if the worker that computed it has not answered."""
        dispatch, decode_s, prompt_s = dispatch_of(self), 0.0, 0.0
        candidate = dispatch.candidate
        if dispatch.decode is None:
            spans = [(start, end) for stage, start, end in self.timeline.history if stage is Stage.DECODE]
            decode_s = sum(max(0.0, end - max(start, self.unreported_since)) for start, end in spans)
        mean_tokens = self.request.num_prompt_tokens + (dispatch.first_index + len(self.delivered)) / 2
        if not (dispatch.prefill if candidate.prefill_worker else dispatch.decode or self.earlier):
            prompt_s = predicted_prefill_s(candidate, self.timeline)
        mean_prompt = candidate.cached_tokens + candidate.uncached_tokens / 2
        return -(-mean_tokens // block_size) * decode_s + -(-mean_prompt // block_size) * prompt_s

    def no_worker_message(self, which: str) -> str:
        last = f"; the last attempt failed: {self.last_error}" if self.last_error else ""
        return f"no decode worker{which} is serving{last}"

    def accept(self, index: int, token_id: int, logprobs: SampledToken | None) -> None:
        """Accept one token. Tokens may come in any order and any number of times.

        Ignores a token without the log-probabilities that the client asked for: the hand-off brings the first token to
        the decode worker without them, and the answer of the prefill worker has them.
        """
        if self.needs_logprobs and logprobs is None:
            return
        delivered = self.delivered
        if index != len(delivered):
            if index > len(delivered):
                self.early_tokens.setdefault(index, (token_id, logprobs))
            return
        delivered.append(token_id)
        if logprobs is not None:
            self.new_logprobs.append(logprobs)
        while self.early_tokens and (early := self.early_tokens.pop(len(delivered), None)) is not None:
            delivered.append(early[0])
            if early[1] is not None:
                self.new_logprobs.append(early[1])

    def take_new(self) -> Deliver | None:
        """The tokens accepted since the last call; None if there are none."""
        delivered, first = self.delivered, self.num_taken
        if first == len(delivered):
            return None
        self.num_taken = len(delivered)
        logprobs: tuple[SampledToken, ...] = ()
        if self.needs_logprobs:
            logprobs, self.new_logprobs = tuple(self.new_logprobs), []
        return Deliver(self.request.request_id, first, tuple(delivered[first:]), logprobs)

    def misses_streamed_tokens(self) -> bool:
        """The decode call has returned, and some of its tokens have not arrived on the token stream."""
        dispatch = self.dispatch
        assert dispatch is not None
        assert dispatch.decode is not None
        num_arrived = len(self.delivered) + len(self.early_tokens) - dispatch.first_index
        if self.needs_logprobs and dispatch.prefill_open:
            num_arrived += 1  # the first token, which only the prefill worker sends with its log-probabilities
        return num_arrived < dispatch.decode.num_tokens


_SUMMED = (
    "queue_s", "prefill_s", "transfer_s", "transfer_exposed_s", "transferred_bytes", "num_moved_blocks",
    "num_skipped_blocks", "drafted_tokens", "accepted_drafts",
)  # fmt: skip


def joined(results: Items[DecodeResult]) -> DecodeResult:
    """Of the workers that a request has moved through, as if one worker had computed all of it."""
    if len(results) == 1:
        return results[0]
    sums = {name: sum(getattr(result, name) for result in results) for name in _SUMMED}
    first = results[0]
    read_tokens, read_bytes = first.read_tokens, first.read_bytes
    return replace(
        results[-1], cached_tokens=first.cached_tokens, read_tokens=read_tokens, read_bytes=read_bytes, **sums
    )


def dispatch_of(routed: RoutedRequest) -> Dispatch:
    """The current attempt, or else the last one."""
    assert routed.last_dispatch is not None, f"{routed.request_id} was never dispatched"
    return routed.last_dispatch


def failed_workers(error: TandemError, worker_id: str, dispatch: Dispatch) -> set[str]:
    """The workers that an attempt with `error`, which `worker_id` returned, adds to `RoutedRequest.failed_workers`.

    None after a full queue. Both workers after a failed hand-off, because either may have caused the failure.
    """
    if isinstance(error, QueueFull):
        return set()
    if isinstance(error, TransferFailed) and dispatch.source is not None:
        return {dispatch.source, dispatch.candidate.decode_worker}
    return {worker_id}
