"""The router: admits requests, chooses their workers, joins the two calls into one stream, and ends each request once.

    RequestArrived -> QUEUE -> PREFILL -> DECODE -> Finish
                        ^         |          |
                        +---------+----------+   a call failed, and trying again can help

Each choice of a call is a request here. All but the first are held in QUEUE until that one has a token.

Laws:
  1. Each request ends with exactly one Finish or Fail, at its deadline at the latest.
  2. Each output index is delivered exactly once, in order, whichever worker it came from and however often.
  3. Tokens delivered are never taken back: a new attempt goes on after them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import replace

from core.config import RouterConfig
from core.deadlines import Deadlines
from core.errors import DeadlineExceeded, QueueFull, RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from core.handoff import TransferId
from core.lifecycle import FinishReason, ServiceRole, Stage, Timeline
from core.machine import Tick
from core.request import Request
from router import events, peer_discovery
from router.events import RouterAction, RouterEvent
from router.policy import Candidate, choose
from router.routed_request import Dispatch, RoutedRequest, blamed, dispatch_id_of
from router.workers import WorkerRecord, WorkerTable


class RouterMachine:
    """`new_ticket` gives the random 128-bit transfer ids. `eos_token_ids` are the model's: a worker that dies between
    its last token and its last word must not have its request resumed behind the end."""

    def __init__(
        self,
        config: RouterConfig,
        new_ticket: Callable[[], TransferId],
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._config = config
        self._new_ticket = new_ticket
        self._eos_token_ids = eos_token_ids
        self.workers = WorkerTable(config)
        self._requests: dict[str, RoutedRequest] = {}
        self._by_dispatch: dict[str, RoutedRequest] = {}
        self._queue: list[RoutedRequest] = []  # by rank
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines()
        # keys: ("request" | "wait" | "retry", request id), ("worker" | "strangers", worker id)
        self._num_arrived = 0
        self._served_until = -math.inf  # when the last serving decode worker went away; inf while one serves
        self._handlers: dict[type, Callable[..., list[RouterAction]]] = {
            events.RequestArrived: self._on_arrived,
            events.ClientCancelled: self._on_cancelled,
            events.StopMatched: self._on_stop_matched,
            events.WorkerJoined: self._on_joined,
            events.WorkerReported: self._on_reported,
            events.WorkerLost: self._on_lost,
            events.PrefillReturned: self._on_prefill,
            events.DecodeTokens: self._on_tokens,
            events.DecodeReturned: self._on_decode,
            Tick: self._on_tick,
        }

    # ---- the contract

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """Raises for a `RequestArrived` `QueueFull` beyond `max_queued`, `InvalidRequest` where no pool could hold it;
        for a `WorkerJoined` `LayoutMismatch`."""
        actions = self._handlers[type(event)](event, now)
        if self._queue and not isinstance(event, events.DecodeTokens):
            actions = actions + self._dispatch_queued(now)
        return actions

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    @property
    def num_queued(self) -> int:
        """Those that are held count as well: they are admitted, and wait."""
        return len(self._requests) - len(self._by_dispatch)

    @property
    def num_in_flight(self) -> int:
        return len(self._by_dispatch)

    def find_candidates(self, request: Request, now: float) -> list[Candidate]:
        """Where `request` could go now, cheapest first; nothing is changed."""
        return self.workers.candidates(request.num_prompt_tokens, self.workers.hashes(request), frozenset(), now)

    # ---- requests arrive and wait

    def _on_arrived(self, event: events.RequestArrived, now: float) -> list[RouterAction]:
        if self.num_queued >= self._config.max_queued:
            raise QueueFull(f"{self.num_queued} requests are queued already (max_queued)")
        self.workers.refuse_oversized(event.request)
        first, *others = [self._admit(request, event, now) for request in (event.request, *event.others)]
        first.followers = others
        self._enqueue(first, now)
        return []

    def _admit(self, request: Request, event: events.RequestArrived, now: float) -> RoutedRequest:
        request_id = request.request_id
        assert request_id not in self._requests, f"{request_id} arrived twice"
        timeline = Timeline(Stage.TOKENIZE, event.arrived_at)
        timeline.enter(Stage.QUEUE, now)
        routed = RoutedRequest(request, self._num_arrived, event.arrived_at, event.deadline, timeline)
        self._num_arrived += 1
        self._requests[request_id] = routed
        self._deadlines.set(("request", request_id), event.deadline)
        return routed

    def _enqueue(self, routed: RoutedRequest, now: float) -> None:
        routed.hashes, routed.queued_at = {}, now
        insort(self._queue, routed, key=lambda queued: queued.rank)
        self._deadlines.set(("wait", routed.request_id), now + self._config.worker_wait_s)

    def _dispatch_queued(self, now: float) -> list[RouterAction]:
        """Send queued requests to workers, in rank order, until one finds no room. Retries may have to pause first."""
        actions: list[RouterAction] = []
        while routed := next((queued for queued in self._queue if queued.not_before <= now), None):
            num_tokens = len(routed.request.token_ids) + len(routed.delivered)
            routed.hashes = routed.hashes or self.workers.hashes(routed.resumed())
            found = self.workers.candidates(num_tokens, routed.hashes, routed.failed_workers, now)
            candidate = choose(found, {r.worker_id: len(r.dispatched) for r in self.workers})
            if candidate is None:
                break
            self._queue.remove(routed)
            actions += self._dispatch(routed, candidate, now)
        return actions

    def _dispatch(self, routed: RoutedRequest, candidate: Candidate, now: float) -> list[RouterAction]:
        self._deadlines.cancel(("wait", routed.request_id))
        routed.timeline.enter(Stage.PREFILL, now)
        routed.attempts += 1
        routed.attempts_without_token += 1
        dispatch_id = dispatch_id_of(routed.request_id, routed.attempts)
        routed.dispatch = Dispatch(dispatch_id, candidate, prefill_open=candidate.prefill_worker is not None)
        routed.last_dispatch = routed.dispatch
        self._by_dispatch[dispatch_id] = routed
        # Workers know the attempt, not the request: its predecessor may still be on its way out there.
        request = replace(routed.resumed(), request_id=dispatch_id)
        timeout_s = max(0.0, routed.deadline - now)
        decode = self.workers.chosen(candidate.decode_worker)
        if candidate.prefill_worker is None:
            decode.dispatched[dispatch_id] = candidate.uncached_tokens
            return [events.StartDecode(dispatch_id, decode.worker_id, request, None, timeout_s)]
        prefill = self.workers.chosen(candidate.prefill_worker)
        decode.dispatched[dispatch_id] = 0
        prefill.dispatched[dispatch_id] = candidate.uncached_tokens
        ticket = self._new_ticket()
        return [
            events.StartDecode(dispatch_id, decode.worker_id, request, (ticket, prefill.agent), timeout_s),
            events.StartPrefill(dispatch_id, prefill.worker_id, request, ticket, decode.agent, timeout_s),
        ]

    # ---- the workers answer

    def _on_prefill(self, event: events.PrefillReturned, now: float) -> list[RouterAction]:
        routed = self._by_dispatch.get(event.dispatch_id)
        if routed is None:
            return []
        dispatch = _dispatch_of(routed)
        prefill_worker = dispatch.candidate.prefill_worker
        assert prefill_worker is not None
        if isinstance(event.result, TandemError):
            return self._on_prefill_failed(routed, event.result, now)
        dispatch.prefill_open = False
        self.workers.take_off(prefill_worker, event.dispatch_id)
        dispatch.prefill = event.result
        actions = self._accept(routed, ((event.result.index, event.result.token),), now)
        if event.result.finish_reason is not None:
            return actions + self._finish(routed, event.result.finish_reason, now)
        return actions + self._finish_if_complete(routed, now)

    def _on_prefill_failed(self, routed: RoutedRequest, error: TandemError, now: float) -> list[RouterAction]:
        dispatch = _dispatch_of(routed)
        prefill_worker = dispatch.candidate.prefill_worker
        assert prefill_worker is not None
        dispatch.prefill_open = False
        self.workers.take_off(prefill_worker, dispatch.dispatch_id)
        if routed.timeline.stage is Stage.DECODE:
            return []  # the first token came with the KV: the decode worker needs nothing more from there
        return self._retry(routed, error, prefill_worker, now)

    def _on_tokens(self, event: events.DecodeTokens, now: float) -> list[RouterAction]:
        routed = self._by_dispatch.get(event.dispatch_id)
        return [] if routed is None else self._accept(routed, event.tokens, now)

    def _on_decode(self, event: events.DecodeReturned, now: float) -> list[RouterAction]:
        routed = self._by_dispatch.get(event.dispatch_id)
        if routed is None:
            return []
        dispatch = _dispatch_of(routed)
        dispatch.decode_open = False
        if isinstance(event.result, TandemError):
            return self._retry(routed, event.result, dispatch.candidate.decode_worker, now)
        dispatch.decode = event.result
        self.workers.take_off(dispatch.candidate.decode_worker, event.dispatch_id)
        return self._finish_if_complete(routed, now)

    def _accept(self, routed: RoutedRequest, tokens: events.IndexedTokens, now: float) -> list[RouterAction]:
        first = routed.accept(tokens)
        if len(routed.delivered) == first:
            return []
        routed.attempts_without_token = 0
        if routed.timeline.stage is Stage.PREFILL:
            routed.timeline.enter(Stage.DECODE, now)
        if routed.first_token_at is None:
            routed.first_token_at, routed.under_way = now, True
        actions: list[RouterAction] = [events.Deliver(routed.request_id, first, tuple(routed.delivered[first:]))]
        return actions + self._release_followers(routed, now)

    def _release_followers(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        followers = self._take_followers(routed)
        for follower in followers:
            follower.under_way = True
            self._enqueue(follower, now)
        return self._dispatch_queued(now) if followers else []

    def _take_followers(self, routed: RoutedRequest) -> list[RoutedRequest]:
        followers, routed.followers = routed.followers, []
        return [follower for follower in followers if follower.request_id in self._requests]

    # ---- requests end, or try again

    def _finish_if_complete(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """The decode worker may be done before the prefill worker's answer brings the first token."""
        dispatch = _dispatch_of(routed)
        if dispatch.decode is None:
            return []
        if routed.timeline.stage is Stage.DECODE and not routed.early:
            return self._finish(routed, dispatch.decode.finish_reason, now)
        if dispatch.prefill_open:
            return []
        missing = TransferFailed(f"both calls ended without token {len(routed.delivered)}")
        return self._retry(routed, missing, dispatch.candidate.decode_worker, now)

    def _finish(self, routed: RoutedRequest, reason: FinishReason, now: float) -> list[RouterAction]:
        actions = self._end_dispatch(routed)
        self._forget(routed, now)
        return [*actions, events.Finish(routed.request_id, routed.outcome(reason))]

    def _retry(self, routed: RoutedRequest, error: TandemError, worker_id: str, now: float) -> list[RouterAction]:
        """One of the calls failed: dispatch anew, elsewhere if possible, after what is delivered already."""
        if isinstance(error, WorkerUnavailable | QueueFull):
            self.workers.suspect(worker_id)
        finish_reason = routed.finish_reason(self._eos_token_ids)
        if finish_reason is not None:
            return self._finish(routed, finish_reason, now)
        # A request that has streamed tokens waits for room until its deadline.
        waits = isinstance(error, QueueFull) and routed.under_way
        if not error.retryable or (routed.attempts_without_token >= self._config.max_attempts and not waits):
            return self._fail(routed, error, now)
        actions = self._end_dispatch(routed)
        routed.failed_workers |= blamed(error, worker_id, _dispatch_of(routed).candidate)
        routed.last_error = str(error)
        routed.early.clear()
        routed.not_before = now + self._config.pause_after(routed.attempts_without_token)
        self._deadlines.set(("retry", routed.request_id), routed.not_before)
        routed.timeline.enter(Stage.QUEUE, now)
        self._enqueue(routed, now)
        return actions

    def _fail(self, routed: RoutedRequest, error: TandemError, now: float) -> list[RouterAction]:
        """A choice that fails without a token takes those along that were held for it."""
        actions = self._end_dispatch(routed)
        self._forget(routed, now)
        actions.append(events.Fail(routed.request_id, error, routed.timeline))
        for follower in self._take_followers(routed):
            actions += self._fail(follower, error, now)
        return actions

    def _end_dispatch(self, routed: RoutedRequest) -> list[RouterAction]:
        """Take the current attempt, if there is one, off its workers and end the calls that are still open."""
        dispatch, routed.dispatch = routed.dispatch, None
        if dispatch is None:
            return []
        del self._by_dispatch[dispatch.dispatch_id]
        self.workers.take_off(dispatch.candidate.decode_worker, dispatch.dispatch_id)
        if dispatch.candidate.prefill_worker is not None:
            self.workers.take_off(dispatch.candidate.prefill_worker, dispatch.dispatch_id)
        if dispatch.prefill_open or dispatch.decode_open:
            return [events.CancelDispatch(dispatch.dispatch_id)]
        return []

    def _forget(self, routed: RoutedRequest, now: float) -> None:
        routed.timeline.enter(Stage.FINISHED, now)
        del self._requests[routed.request_id]
        if routed in self._queue:
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
        actions: list[RouterAction] = []
        for kind, name in self._deadlines.expire(now):
            if kind == "worker":
                lost = events.WorkerLost(name, f"silent for {self._config.worker_lost_s:g} s")
                actions += self._on_lost(lost, now)
                continue
            if kind == "strangers":
                actions += self._look_for_strangers(name, now)
                continue
            routed = self._requests.get(name)
            if routed is None or kind == "retry":
                continue
            if kind == "request":
                stage = routed.timeline.stage.value
                actions += self._fail(routed, DeadlineExceeded(f"the deadline passed in stage {stage}"), now)
            else:
                actions += self._fail_unserved(routed, now)
        return actions

    def _fail_unserved(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """Fail a queued request once no decode worker has served for `worker_wait_s`, else look again later."""
        wait_s = self._config.worker_wait_s
        due = max(self._served_until, routed.queued_at) + wait_s
        if due <= now:
            return self._fail(routed, WorkerUnavailable(routed.why_no_worker), now)
        self._deadlines.set(("wait", routed.request_id), min(due, now + wait_s))
        return []

    # ---- workers come, report and go

    def _on_joined(self, event: events.WorkerJoined, now: float) -> list[RouterAction]:
        record = WorkerRecord(event.worker_id, event.role, event.agent, event.load, reported_at=now)
        self.workers.refuse_layout(record)
        known = self.workers.get(event.worker_id)
        actions: list[RouterAction] = []
        if known is not None and known.agent.incarnation != event.agent.incarnation:
            actions = self._on_lost(events.WorkerLost(event.worker_id, "it was started anew"), now)
        self.workers.join(record, event.cached_blocks)
        self._deadlines.set(("worker", event.worker_id), now + self._config.worker_lost_s)
        self._deadlines.set(("strangers", event.worker_id), now + self._config.worker_lost_s)
        self._note_service(now)
        return actions + peer_discovery.announce(record, self.workers)

    def _note_service(self, now: float) -> None:
        """Call after each change of a worker."""
        if self.workers.has_role(ServiceRole.DECODE):
            self._served_until = math.inf
        elif self._served_until == math.inf:
            self._served_until = now

    def _look_for_strangers(self, worker_id: str, now: float) -> list[RouterAction]:
        """Forget the peers of this worker that have not joined by now: they will not."""
        record = self.workers.get(worker_id)
        if record is None:
            return []  # lost at this very moment
        self._deadlines.set(("strangers", worker_id), now + self._config.worker_lost_s)
        return [*peer_discovery.forget_strangers(record, self.workers)]

    def _on_reported(self, event: events.WorkerReported, now: float) -> list[RouterAction]:
        if self.workers.take_report(event.worker_id, event.load, event.block_changes, now):
            self._deadlines.set(("worker", event.worker_id), now + self._config.worker_lost_s)
            self._note_service(now)
        return []

    def _on_lost(self, event: events.WorkerLost, now: float) -> list[RouterAction]:
        record = self.workers.leave(event.worker_id)
        self._note_service(now)
        self._deadlines.cancel(("worker", event.worker_id))
        self._deadlines.cancel(("strangers", event.worker_id))
        if record is None:
            return []
        actions: list[RouterAction] = [*peer_discovery.forget(record, self.workers)]
        for dispatch_id in list(record.dispatched):
            routed = self._by_dispatch.get(dispatch_id)
            if routed is None:
                continue
            error = WorkerUnavailable(f"worker {event.worker_id} was lost: {event.detail}")
            if event.worker_id == _dispatch_of(routed).candidate.prefill_worker:
                actions += self._on_prefill_failed(routed, error, now)
            else:
                actions += self._retry(routed, error, event.worker_id, now)
        return actions

    def check(self) -> None:
        """Every request is queued, held or dispatched; workers carry exactly the dispatches that are open."""
        queued = [routed.request_id for routed in self._queue]
        followers = [follower for routed in self._requests.values() for follower in routed.followers]
        held = [follower.request_id for follower in followers if follower.request_id in self._requests]
        dispatched = [r.request_id for r in self._requests.values() if r.dispatch is not None]
        assert sorted(queued + held + dispatched) == sorted(self._requests)
        assert self.num_queued == len(queued) + len(held)
        assert self._queue == sorted(self._queue, key=lambda routed: routed.rank)
        assert self._by_dispatch.keys() == {r.dispatch.dispatch_id for r in self._requests.values() if r.dispatch}
        for record in self.workers:
            assert record.dispatched.keys() <= self._by_dispatch.keys()
        assert (self._served_until == math.inf) == self.workers.has_role(ServiceRole.DECODE)
        self.workers.check()


def _dispatch_of(routed: RoutedRequest) -> Dispatch:
    assert routed.last_dispatch is not None, f"{routed.request_id} was never dispatched"
    return routed.last_dispatch
