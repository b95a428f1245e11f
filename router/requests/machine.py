"""The router: admits requests, chooses their workers, joins the two calls into one stream, and ends each request once.

    RequestArrived -> QUEUE -> PREFILL -> DECODE -> Finish
                        ^         |          |
                        +---------+----------+   a call failed with a retryable error

Each choice of a call is a request here. The first choice starts at once. The others wait in QUEUE until its decode
worker sends a token, and go to that worker, which has the KV of the prompt by then: a prompt moves once. If the first
token of the prefill worker is the last one, it does not move, and the others start where it was computed.

Laws:
  1. Each request ends with exactly one Finish or Fail, at its deadline at the latest.
  2. Each output index is delivered exactly once and in order, even if several workers send the same index.
  3. A delivered token is never taken back: a new attempt continues after the delivered tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from core.config import RouterConfig
from core.deadlines import Deadlines
from core.errors import (
    DeadlineExceeded,
    ErrorCode,
    OutOfDeviceMemory,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerDrains,
    WorkerUnavailable,
)
from core.handoff import TransferId
from core.lifecycle import FinishReason, Stage, Timeline
from core.machine import Tick
from core.request import Request
from router.requests import events
from router.requests.dispatch_queue import DispatchQueue
from router.requests.events import RouterAction, RouterEvent
from router.requests.moves import OpenMoves
from router.requests.open_dispatches import OpenDispatches
from router.requests.routed_request import RoutedRequest, dispatch_of
from router.requests.router_view import RouterView
from router.requests.worker_liveness import WorkerLiveness
from router.routing.policy import SecondsPolicy
from router.routing.question import Candidate, Policy
from router.routing.worker_record import WorkerRecord
from router.routing.workers import NOT_TIMED, WorkerTable

# Limit: the answer of a prefill worker, with its usage, behind the last token; beyond: the request ends without
LATE_PREFILL_S = 0.5
MISSING_TOKENS_S = 5.0  # from the end of a decode call to the last of its tokens; beyond: retried elsewhere


class RouterMachine:
    """`new_ticket` returns a random 128-bit transfer id. `router_id` names the router in its calls and in reports. If a
    worker dies after it sent one of `eos_token_ids`, the machine finishes the request instead of resuming it."""

    def __init__(
        self,
        config: RouterConfig,
        new_ticket: Callable[[], TransferId],
        eos_token_ids: frozenset[int] = frozenset(),
        router_id: str = "router",
        policy: Policy | None = None,
        decision_timer: AbstractContextManager[object] = NOT_TIMED,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self.router_id = router_id
        self.workers = WorkerTable(config, policy or SecondsPolicy(config), decision_timer)
        self._requests: dict[str, RoutedRequest] = {}
        self._dispatches = OpenDispatches(self.workers, new_ticket)
        self._moves = OpenMoves(self.workers, self._dispatches)
        self._queue = DispatchQueue(self.workers)
        self._liveness = WorkerLiveness(self.workers, router_id)
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines()  # (kind, as in `_on_tick`, and id)
        self._num_arrived = 0
        self._num_retries: Counter[ErrorCode] = Counter()  # by error of the attempt that failed
        counts = self._num_retries, self._moves.outcomes
        self.view = RouterView(self._requests, self._dispatches, self.workers, *counts)
        self._handlers: dict[type, Callable[..., list[RouterAction]]] = {
            events.RequestArrived: self._on_arrived,
            events.ClientCancelled: self._on_cancelled,
            events.StopMatched: self._on_stop_matched,
            events.WorkerJoined: self._on_joined,
            events.WorkerReported: self._on_reported,
            events.WorkerLeaves: self._on_leaves,
            events.WorkerLost: self._on_lost,
            events.PrefillReturned: self._on_prefill,
            events.StepTokens: self._on_step_tokens,
            events.TokenStreamLost: self._on_stream_lost,
            events.MoveRefused: self._moves.on_refused,
            events.PrefixRefused: self._on_prefix_refused,
            events.DecodeReturned: self._on_decode,
            events.ConfigChanged: self._on_config,
            events.StartExpected: self._on_start_expected,
            Tick: self._on_tick,
        }

    # ---- the contract

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """A refused event changes nothing. `RequestArrived` raises `QueueFull` when `max_queued` requests wait and its
        tenant has most of them, or when the wait for room alone is too long, and `InvalidRequest` when no pool can hold
        the request, or the fleet what follows it. `WorkerJoined` raises `LayoutMismatch`."""
        actions = self._handlers[type(event)](event, now)
        if self._queue:
            actions = actions + self._dispatch_queued(now)
        return actions

    def next_deadline(self) -> float | None:
        deadlines = (self._deadlines.next(), self._liveness.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # ---- requests arrive and wait

    def _on_arrived(self, event: events.RequestArrived, now: float) -> list[RouterAction]:
        displaced = self._queue.displaced_by(event, self.view.num_queued)
        self.workers.refuse_oversized(event.request)
        self._queue.refuse_arrival(event, now)
        actions = [] if displaced is None else self._fail(*displaced, now)
        first, *others = [self._admit(request, event, now) for request in (event.request, *event.others)]
        first.held_choices = others
        self._enqueue(first, now)
        return actions

    def _admit(self, request: Request, event: events.RequestArrived, now: float) -> RoutedRequest:
        request_id = request.request_id
        assert request_id not in self._requests, f"{request_id} arrived twice"
        timeline = Timeline(Stage.TOKENIZE, event.arrived_at)
        timeline.enter(Stage.QUEUE, now)
        routed = RoutedRequest(
            request, self._num_arrived, event.arrived_at, event.deadline, timeline, delivered=list(event.delivered)
        )
        self._num_arrived += 1
        self._requests[request_id] = routed
        self._deadlines.set(("request", request_id), event.deadline)
        return routed

    def _enqueue(self, routed: RoutedRequest, now: float) -> None:
        self._queue.add(routed, now)
        self._deadlines.set(("wait", routed.request_id), now + self.workers.wait_s)

    def _dispatch_queued(self, now: float) -> list[RouterAction]:
        actions: list[RouterAction] = []
        while (taken := self._queue.take(now)) is not None:
            if taken.refused is not None:
                actions += self._fail(taken.routed, taken.refused, now)
            else:
                actions += self._dispatch(taken.routed, taken.candidate, now)
        return actions

    def _dispatch(self, routed: RoutedRequest, candidate: Candidate, now: float) -> list[RouterAction]:
        self._deadlines.cancel(("wait", routed.request_id))
        routed.preferred_worker = ""
        routed.timeline.enter(Stage.PREFILL, now)
        ttft_s = now - routed.arrived_at + candidate.first_token_s
        if routed.first_token_at is None:
            routed.predicted_first_token_s = ttft_s
        num_tokens = routed.request.num_prompt_tokens + len(routed.delivered)
        tpot_s = self.workers.step_seconds(candidate.decode_worker, num_tokens)
        routed.promise = events.Promise(ttft_s, tpot_s, candidate.path)
        routed.attempts += 1
        routed.attempts_without_token += 1
        routed.unreported_since = now
        return self._dispatches.start(routed, candidate, now)

    # ---- answers of the workers

    def _on_prefill(self, event: events.PrefillReturned, now: float) -> list[RouterAction]:
        routed = self._dispatches.by_id.get(event.dispatch_id)
        if routed is None:
            return []
        if isinstance(event.result, TandemError):
            return self._on_prefill_failed(routed, event.result, now)
        worker_id = self._dispatches.end_prefill(routed)
        dispatch_of(routed).prefill = event.result
        self._dispatches.end_read(dispatch_of(routed), event.result.read_tokens, now)
        routed.kv_block_seconds += event.result.kv_block_seconds
        routed.note_recomputed(event.result.cached_tokens)
        token = event.result.token
        routed.accept(event.result.index, token.token_id, None if token.logprob is None else token)
        actions = self._dispatches.hand_over(routed, event.result, now)
        self._deliver_new(routed, actions, now)
        if event.result.finish_reason is None:
            return actions + self._finish_if_complete(routed, now)
        if not dispatch_of(routed).first_index <= event.result.index < len(routed.delivered):
            lost = WorkerUnavailable(f"the prefill worker ended at token {event.result.index}, which it did not send")
            return actions + self._retry(routed, lost, worker_id, now)
        return actions + self._finish(routed, event.result.finish_reason, now)

    def _on_prefill_failed(self, routed: RoutedRequest, error: TandemError, now: float) -> list[RouterAction]:
        prefill_worker = self._dispatches.end_prefill(routed)
        if routed.timeline.stage is Stage.DECODE:
            return self._finish_if_complete(routed, now)  # the decode worker has the KV, and the first token
        return self._retry(routed, error, prefill_worker, now)

    def _on_step_tokens(self, event: events.StepTokens, now: float) -> list[RouterAction]:
        """Drops tokens of calls that have ended for the router."""
        by_call, logprobs, moving = self._dispatches.by_call, event.logprobs, self._moves.by_call
        accepting: dict[int, RoutedRequest] = {}
        for place, (call, index, token_id) in enumerate(zip(event.calls, event.indexes, event.token_ids, strict=True)):
            routed = by_call.get(call)
            if routed is None and (routed := moving.get(call)) is not None:
                routed = routed if self._moves.accept(routed, call, index) else None
            if routed is not None:
                routed.accept(index, token_id, logprobs.get(place))
                accepting[call] = routed
                if routed.held_choices:
                    self._start_held_choices(routed, dispatch_of(routed).candidate.decode_worker, now)
        actions: list[RouterAction] = []
        for notice in event.moves:
            actions += self._moves.on_notice(notice, now)
        for routed in accepting.values():
            self._deliver_new(routed, actions, now)
            if dispatch_of(routed).decode is not None:
                actions += self._finish_if_complete(routed, now)
        return actions

    def _on_stream_lost(self, event: events.TokenStreamLost, now: float) -> list[RouterAction]:
        """Retry every request with tokens to come. The worker ends the calls of a broken stream."""
        record = self.workers.get(event.worker_id)
        if record is None:
            return []
        self.workers.suspect(event.worker_id)
        lost = WorkerUnavailable(f"the token stream of worker {event.worker_id} broke: {event.detail}")
        return self._retry_dispatches(record, lost, now)

    def _on_decode(self, event: events.DecodeReturned, now: float) -> list[RouterAction]:
        result = event.result
        moved = self._moves.on_returned(event, now)
        routed = self._dispatches.by_id.get(event.dispatch_id)
        if routed is None:
            return moved
        dispatch = dispatch_of(routed)
        dispatch.decode_open = False
        if isinstance(result, TandemError):
            return self._retry(routed, result, dispatch.candidate.decode_worker, now)
        if result.finish_reason is FinishReason.HANDOFF:
            lost = TransferFailed("the sequence has moved to a call that the router has ended")
            return self._retry(routed, lost, dispatch.candidate.decode_worker, now)
        routed.note_decoded(dispatch, result)
        if dispatch.transfer_id is None:
            self._dispatches.end_read(dispatch, result.read_tokens, now)
        return self._finish_if_complete(routed, now)

    def _on_prefix_refused(self, event: events.PrefixRefused, now: float) -> list[RouterAction]:
        """The reader computes the prefix, or already has."""
        if isinstance(event.error, WorkerUnavailable):
            self.workers.suspect(event.worker_id)
        routed = self._dispatches.by_id.get(event.dispatch_id)
        if routed is not None:
            self._dispatches.end_read(dispatch_of(routed), 0, now)
        return []

    def _deliver_new(self, routed: RoutedRequest, actions: list[RouterAction], now: float) -> None:
        """Append a `Deliver` with the tokens that were accepted since the last call."""
        deliver = routed.take_new()
        if deliver is not None:
            actions.append(deliver)
            if routed.attempts_without_token:
                self._on_first_token(routed, now)

    def _on_first_token(self, routed: RoutedRequest, now: float) -> None:
        """An attempt has delivered its first new token."""
        routed.attempts_without_token = 0
        if routed.timeline.stage is Stage.PREFILL:
            routed.timeline.enter(Stage.DECODE, now)
        if routed.first_token_at is None:
            routed.first_token_at, routed.has_streamed = now, True

    def _start_held_choices(self, routed: RoutedRequest, worker_id: str, now: float) -> None:
        """`worker_id`: has the KV of the prompt; empty if none has."""
        for choice in self._take_held_choices(routed):
            choice.has_streamed, choice.preferred_worker = True, worker_id
            self._enqueue(choice, now)

    def _take_held_choices(self, routed: RoutedRequest) -> list[RoutedRequest]:
        choices, routed.held_choices = routed.held_choices, []
        return [choice for choice in choices if choice.request_id in self._requests]

    # ---- ends and retries of requests

    def _finish_if_complete(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """Finish when both calls have returned, or the prefill call is late, and all tokens have arrived."""
        dispatch = routed.dispatch
        if dispatch is None or dispatch.decode is None:
            return []
        if routed.misses_streamed_tokens():
            self._deadlines.set(("tokens", routed.request_id), now + MISSING_TOKENS_S)
            return []
        self._deadlines.cancel(("tokens", routed.request_id))
        self.workers.remove_dispatch(dispatch.candidate.decode_worker, dispatch.dispatch_id)
        if len(routed.delivered) >= dispatch.first_index + dispatch.decode.num_tokens and not routed.early_tokens:
            if not dispatch.prefill_open:
                return self._finish(routed, dispatch.decode.finish_reason, now)
            self._deadlines.cancel(("request", routed.request_id))  # nothing can fail any more
            self._deadlines.set(("prefill", routed.request_id), min(now + LATE_PREFILL_S, routed.deadline))
            return []
        if dispatch.prefill_open:
            return []  # the first token is still to come from the prefill worker
        missing = TransferFailed(f"both calls ended without token {len(routed.delivered)}")
        return self._retry(routed, missing, dispatch.candidate.decode_worker, now)

    def _finish(self, routed: RoutedRequest, reason: FinishReason, now: float) -> list[RouterAction]:
        actions = self._end_dispatch(routed, None, now)
        self._forget(routed, now)
        dispatch, slo_itl_s = dispatch_of(routed), 0.0
        # No decode worker has the KV: it would have sent a token, and the choices would have started.
        prefill_worker = dispatch.candidate.prefill_worker if dispatch.prefill is not None else None
        self._start_held_choices(routed, prefill_worker or "", now)
        decode = self.workers.get(dispatch.candidate.decode_worker)
        if decode is not None:
            slo_itl_s = decode.load.slo_itl_s
            routed.kv_block_seconds += routed.unreported_block_seconds(decode.agent.layout.block_size)
        outcome = routed.outcome(reason, slo_itl_s)
        return [*actions, events.Finish(routed.request_id, outcome, tuple(routed.ended_attempts))]

    def _retry(self, routed: RoutedRequest, error: TandemError, worker_id: str, now: float) -> list[RouterAction]:
        """Queue a request again after one of its calls failed, or end it. The next attempt avoids the failed worker.

        A request that its worker has handed over goes on at the target of its move.
        """
        if isinstance(error, WorkerUnavailable | QueueFull | OutOfDeviceMemory):
            self.workers.suspect(worker_id)
        self._end_read_of_failed(routed, error, worker_id, now)
        if self._moves.survives(routed, error, now):
            return []
        finish_reason = routed.finish_reason(self._eos_token_ids)
        if finish_reason is not None:
            return self._finish(routed, finish_reason, now)
        if not routed.may_retry(error, self.workers.config.max_attempts):
            return self._fail(routed, error, now)
        actions = self._end_dispatch(routed, error, now)
        routed.note_failed(error, worker_id)
        self._num_retries[error.code] += 1
        routed.not_before = now + self.workers.config.pause_after(routed.attempts_without_token)
        self._deadlines.set(("retry", routed.request_id), routed.not_before)
        routed.timeline.enter(Stage.QUEUE, now)
        self._enqueue(routed, now)
        return actions

    def _end_read_of_failed(self, routed: RoutedRequest, error: TandemError, worker_id: str, now: float) -> None:
        """A call that computes a prompt has failed. Its source may be why, unless the worker never began."""
        dispatch = dispatch_of(routed)
        computes = worker_id == (dispatch.candidate.prefill_worker or dispatch.candidate.decode_worker)
        if computes and routed.timeline.stage is Stage.PREFILL and not (dispatch.prefill or dispatch.decode):
            has_begun = not isinstance(error, QueueFull | WorkerDrains)
            self._dispatches.end_read(dispatch, 0 if has_begun else None, now)

    def _fail(self, routed: RoutedRequest, error: TandemError, now: float) -> list[RouterAction]:
        """Fail a request, and with it the choices that wait for its decode worker."""
        actions = self._end_dispatch(routed, error, now)
        self._forget(routed, now)
        actions.append(events.Fail(routed.request_id, error, routed.timeline, tuple(routed.ended_attempts)))
        for choice in self._take_held_choices(routed):
            actions += self._fail(choice, error, now)
        return actions

    def _end_dispatch(self, routed: RoutedRequest, error: TandemError | None, now: float) -> list[RouterAction]:
        self._deadlines.cancel(("tokens", routed.request_id))
        self._deadlines.cancel(("prefill", routed.request_id))
        actions = self._moves.end(routed, now)
        routed.record_attempt(error, now)
        return actions + self._dispatches.end(routed)

    def _forget(self, routed: RoutedRequest, now: float) -> None:
        routed.timeline.enter(Stage.FINISHED, now)
        del self._requests[routed.request_id]
        self._queue.remove(routed)
        self._deadlines.cancel(("request", routed.request_id))
        self._deadlines.cancel(("wait", routed.request_id))

    def _on_cancelled(self, event: events.ClientCancelled, now: float) -> list[RouterAction]:
        routed = self._requests.get(event.request_id)
        return [] if routed is None else self._fail(routed, RequestCancelled("cancelled by the client"), now)

    def _on_stop_matched(self, event: events.StopMatched, now: float) -> list[RouterAction]:
        routed = self._requests.get(event.request_id)
        return [] if routed is None else self._finish(routed, FinishReason.STOP, now)

    def _on_tick(self, _: Tick, now: float) -> list[RouterAction]:
        silent, updates = self._liveness.expire(now)
        actions: list[RouterAction] = [*updates]
        for event in silent:
            actions += self._on_lost(event, now)
        for kind, name in self._deadlines.expire(now):
            routed = self._requests.get(name)
            if routed is None or kind == "retry":
                continue
            if kind == "tokens":
                actions += self._retry_without_tokens(routed, now)
            elif kind == "prefill":
                decode = dispatch_of(routed).decode
                assert decode is not None
                actions += self._finish(routed, decode.finish_reason, now)
            elif kind == "request":
                stage = routed.timeline.stage.value
                actions += self._fail(routed, DeadlineExceeded(f"the deadline passed in stage {stage}"), now)
            else:
                actions += self._fail_unserved(routed, now)
        return actions

    def _fail_unserved(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """Fail a queued request if no decode worker has served for `wait_s`, else check again later. A request that no
        serving worker can hold waits from its queueing on."""
        wait_s, served_until, which = self.workers.wait_s, self.workers.served_until, ""
        if served_until == math.inf and not self.workers.can_decode(routed.request):
            served_until, which = routed.queued_at, f" that holds {routed.request.max_total_tokens} tokens"
        due = max(served_until, routed.queued_at) + wait_s
        if due <= now:
            return self._fail(routed, WorkerUnavailable(routed.no_worker_message(which)), now)
        self._deadlines.set(("wait", routed.request_id), min(due, now + wait_s))
        return []

    def _retry_without_tokens(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """Retry after a decode call that has returned, if the token stream does not bring the rest of its tokens."""
        dispatch = routed.dispatch
        if dispatch is None or dispatch.decode is None:
            return []  # another deadline of the same Tick has ended the attempt
        late = f"token {len(routed.delivered)} has not arrived {MISSING_TOKENS_S:g} s after the end of its call"
        return self._retry(routed, WorkerUnavailable(late), dispatch.candidate.decode_worker, now)

    # ---- workers join, report and leave

    def _on_config(self, event: events.ConfigChanged, now: float) -> list[RouterAction]:
        """Deadlines that depend on the config are looked at again. What runs or waits beyond a new limit goes on."""
        self.workers.set_config(event.config)
        self._liveness.check_again(now)
        self._check_waits_again(now)
        return []

    def _on_start_expected(self, event: events.StartExpected, now: float) -> list[RouterAction]:
        self.workers.start_s = event.start_s
        self._check_waits_again(now)
        return []

    def _check_waits_again(self, now: float) -> None:
        for routed in self._queue:
            self._deadlines.set(("wait", routed.request_id), now)

    def _on_joined(self, event: events.WorkerJoined, now: float) -> list[RouterAction]:
        record = self._liveness.record_of(event, now)
        actions: list[RouterAction] = []
        if self._liveness.has_restarted(record):
            actions = self._on_lost(events.WorkerLost(event.worker_id, "the worker restarted"), now)
        return [*actions, *self._liveness.join(record, event.cached_blocks, now)]

    def _on_reported(self, event: events.WorkerReported, now: float) -> list[RouterAction]:
        self.workers.take_report(event.worker_id, event.changes, now)
        return []

    def _on_leaves(self, event: events.WorkerLeaves, now: float) -> list[RouterAction]:
        self.workers.note_leaving(event.worker_id, now)
        return []

    def _on_lost(self, event: events.WorkerLost, now: float) -> list[RouterAction]:
        record, updates = self._liveness.leave(event.worker_id, now)
        if record is None:
            return []
        for queued in self._queue:  # the worker may return under its name, without their prompts
            if queued.preferred_worker == event.worker_id:
                queued.preferred_worker = ""
        lost = WorkerUnavailable(f"worker {event.worker_id} was lost: {event.detail}")
        return [*updates, *self._retry_dispatches(record, lost, now)]

    def _retry_dispatches(self, record: WorkerRecord, error: TandemError, now: float) -> list[RouterAction]:
        """Retry every request that still needs something of this worker."""
        actions: list[RouterAction] = []
        for dispatch_id in list(record.dispatched):
            routed = self._dispatches.by_id.get(dispatch_id)
            if routed is None:
                actions += self._moves.on_lost(dispatch_id, error)
                continue
            dispatch = dispatch_of(routed)  # a move may have brought it to the worker that had computed its prompt
            computes = dispatch.prefill_open and record.worker_id == dispatch.candidate.prefill_worker
            if computes and routed.timeline.stage is Stage.DECODE:  # it is done, but for its answer
                actions.append(events.CancelDispatch(dispatch_id, self._dispatches.end_prefill(routed)))
                actions += self._finish_if_complete(routed, now)
            else:
                actions += self._retry(routed, error, record.worker_id, now)
        return actions

    def check(self) -> None:
        """Every request is queued, held or dispatched, and the workers carry no dispatch that has ended."""
        queued = [routed.request_id for routed in self._queue]
        choices = [choice for routed in self._requests.values() for choice in routed.held_choices]
        held = [choice.request_id for choice in choices if choice.request_id in self._requests]
        dispatched = [r.request_id for r in self._requests.values() if r.dispatch is not None]
        assert sorted(queued + held + dispatched) == sorted(self._requests)
        assert self.view.num_queued == len(queued) + len(held)
        self._queue.check()
        self._dispatches.check(self._requests.values(), self._moves.by_id.keys())
        self._moves.check(self._requests.values())
        self._liveness.check()
        self.workers.check()

    def check_calls(self, dispatch_ids: Iterable[str]) -> None:
        """Each call that the shell has open is of an attempt or of a move: the machine has cancelled the others."""
        left = set(dispatch_ids) - self._dispatches.by_id.keys() - self._moves.by_id.keys()
        assert not left, f"calls that nobody will end are open: {left}"
