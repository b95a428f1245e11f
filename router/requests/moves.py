"""Moves of running requests from one decode worker to another. The router that has the request decides.

    the source asks --> the target's Decode call, and the reader for the source: `RoutedRequest.move`
        the target sends tokens, or the source ends after it has handed over --> the target's call is the current one
        the target's call fails before the router takes a token of it        --> ResumeSequence: the source samples on

The current dispatch is that of the source until the target takes over. Afterwards the source only repeats what the
target says too, and its call ends when the target has released the blocks. Laws:

  1. A token of the target ends the part of the source: the router never sends ResumeSequence after it.
  2. A source that fails after it has handed over fails nothing: the target goes on, or its own call fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from core.errors import QueueFull, TandemError, WorkerUnavailable
from core.lifecycle import FinishReason, MoveReason, Stage
from router.requests import events
from router.requests.events import DecodeResult, RouterAction
from router.requests.open_dispatches import OpenDispatches
from router.requests.routed_request import Dispatch, Move, RoutedRequest
from router.routing.worker_record import CallWork
from router.routing.workers import WorkerTable, hashes_of

MIN_TOKENS_LEFT = 2  # with fewer tokens to come, a request ends where it is
MAX_ROOM_MOVES = 2  # of one request, for lack of room: a fleet that is full would only pass it on
MOVED = "moved"


class MoveOutcome(NamedTuple):
    reason: MoveReason
    outcome: str  # moved | failed | no_room


class OpenMoves:
    """`by_id` and `by_call` have the calls of targets before they take over, and those of sources afterwards."""

    def __init__(self, workers: WorkerTable, dispatches: OpenDispatches) -> None:
        self._workers, self._dispatches = workers, dispatches
        self.by_id: dict[str, RoutedRequest] = {}
        self.by_call: dict[int, RoutedRequest] = {}
        self.outcomes: Counter[MoveOutcome] = Counter()

    # ---- events

    def on_notice(self, notice: events.MoveNotice, now: float) -> list[RouterAction]:
        """A worker asks for a move, or says where the part of the target begins."""
        routed = self._dispatches.by_call.get(notice.call)
        if notice.first_index is None:
            return [] if routed is None else self._start(routed, notice.reason, now)
        routed = routed or self.by_call.get(notice.call)
        if routed is not None and routed.move is not None:
            routed.move.first_index = notice.first_index
            if notice.call == routed.move.target.call:
                self._take_over(routed)
        elif routed is not None and routed.left and notice.call not in self.by_call:
            routed.left[-1].end_index = notice.first_index
        return []

    def on_refused(self, event: events.MoveRefused, _: float) -> list[RouterAction]:
        """The target waits in vain, unless the source has ended meanwhile, and with it the move."""
        routed = self.by_id.get(event.dispatch_id)
        if routed is None or not self._is_target(routed, event.dispatch_id):
            return []
        return self._fail_target(routed, event.error)

    def on_returned(self, event: events.DecodeReturned, now: float) -> list[RouterAction]:
        """Call it for each answer of a Decode call, before the current dispatch is looked up: it may become another."""
        result, dispatch_id = event.result, event.dispatch_id
        has_moved = isinstance(result, DecodeResult) and result.finish_reason is FinishReason.HANDOFF
        source = self._dispatches.by_id.get(dispatch_id)
        if has_moved and source is not None and source.move is not None:
            self._take_over(source)
        routed = self.by_id.get(dispatch_id)
        if routed is None:
            return []
        if not self._is_target(routed, dispatch_id):
            self._source_returned(routed, dispatch_id, result, now)
            return []
        assert routed.move is not None
        routed.move.target.decode_open = False
        if isinstance(result, TandemError):
            return self._fail_target(routed, result)
        self._take_over(routed)
        return []

    def on_lost(self, dispatch_id: str, error: TandemError) -> list[RouterAction]:
        """The router has lost the worker of a call. Does nothing for a call of no move."""
        routed = self.by_id.get(dispatch_id)
        if routed is not None and self._is_target(routed, dispatch_id):
            return self._fail_target(routed, error)
        return []  # a source has handed over, and no answer of it is needed

    def survives(self, routed: RoutedRequest, error: TandemError, now: float) -> bool:
        """The current dispatch has failed. Whether it had handed over: then the target goes on."""
        if routed.move is None or routed.move.first_index is None:
            return False
        source = self._take_over(routed)
        self._source_returned(routed, source.dispatch_id, error, now)
        return True

    def accept(self, routed: RoutedRequest, call: int, index: int) -> bool:
        """Whether a token of a call of `by_call` counts. The first token of a target makes the target take over."""
        if routed.move is not None and routed.move.target.call == call:
            self._take_over(routed)
            return True
        source = next(dispatch for dispatch in routed.left if dispatch.call == call)
        return source.end_index is None or index < source.end_index

    def end(self, routed: RoutedRequest, now: float) -> list[RouterAction]:
        """The current attempt ends: so do the move, and the calls of earlier sources."""
        actions = [] if routed.move is None else self._drop_target(routed)
        left, routed.left = routed.left, []
        for source in left:
            routed.record_dispatch(source, None, now)
            del self.by_id[source.dispatch_id], self.by_call[source.call]
            self._workers.remove_dispatch(source.candidate.decode_worker, source.dispatch_id)
            if source.decode_open:
                actions.append(events.CancelDispatch(source.dispatch_id))
        return actions

    # ---- inside

    def _start(self, routed: RoutedRequest, reason: MoveReason, now: float) -> list[RouterAction]:
        """The worker of the current dispatch asks for a move. Does nothing without a worker that has room."""
        source = routed.dispatch
        if source is None or not self._can_move(routed, source):
            return []
        request, worker_id = routed.resumed(), source.candidate.decode_worker
        avoid = routed.failed_workers
        target = None
        if reason is MoveReason.DRAIN or routed.num_room_moves < MAX_ROOM_MOVES:
            target = self._workers.choose_target(
                hashes_of(request), request.max_total_tokens, worker_id, avoid, now, reason
            )
        if target is None:
            self.outcomes[MoveOutcome(reason, "no_room")] += 1
            return []
        dispatch = self._dispatches.open_move(routed, target.decode_worker, now)
        routed.move = Move(dispatch, reason)
        self.by_id[dispatch.dispatch_id] = self.by_call[dispatch.call] = routed
        reader, owner = self._workers.chosen(target.decode_worker), self._workers.chosen(worker_id)
        reader.add_call(dispatch.dispatch_id, dispatch.call, CallWork(num_blocks=target.transfer_blocks))
        ticket, timeout_s, age_s = dispatch.transfer_id, max(0.0, routed.deadline - now), now - routed.arrived_at
        assert ticket is not None
        return [
            events.StartDecode(
                dispatch.dispatch_id, reader.worker_id, request.derive(request_id=dispatch.dispatch_id, age_s=age_s),
                (ticket, owner.agent), timeout_s, dispatch.call, is_move=True,
            ),
            events.StartMove(
                dispatch.dispatch_id, source.dispatch_id, worker_id, ticket, reader.agent, len(request.token_ids)
            ),
        ]  # fmt: skip

    def _is_target(self, routed: RoutedRequest, dispatch_id: str) -> bool:
        return routed.move is not None and routed.move.target.dispatch_id == dispatch_id

    def _can_move(self, routed: RoutedRequest, source: Dispatch) -> bool:
        """True if the request decodes, has at least MIN_TOKENS_LEFT to go, and has no move yet."""
        num_left = routed.request.sampling.max_tokens - len(routed.delivered)
        is_decoding = routed.timeline.stage is Stage.DECODE and not source.prefill_open and source.decode is None
        knows_worker = self._workers.get(source.candidate.decode_worker) is not None
        return is_decoding and routed.move is None and num_left >= MIN_TOKENS_LEFT and knows_worker

    def _take_over(self, routed: RoutedRequest) -> Dispatch:
        """The target's call becomes the current dispatch. Returns that of the source."""
        source, move = routed.dispatch, routed.move
        assert source is not None
        assert move is not None
        target, routed.move = move.target, None
        del self.by_id[target.dispatch_id], self.by_call[target.call]
        self._dispatches.replace(routed, target)
        source.end_index = move.first_index
        routed.left.append(source)
        self.by_id[source.dispatch_id] = self.by_call[source.call] = routed
        routed.num_moves += 1
        routed.num_room_moves += move.reason is MoveReason.ROOM
        self.outcomes[MoveOutcome(move.reason, MOVED)] += 1
        return source

    def _fail_target(self, routed: RoutedRequest, error: TandemError) -> list[RouterAction]:
        """The target's call has ended, or is given up, before the router has taken a token of it."""
        move, source = routed.move, routed.dispatch
        assert move is not None
        assert source is not None
        worker_id = move.target.candidate.decode_worker
        if isinstance(error, WorkerUnavailable | QueueFull):
            self._workers.suspect(worker_id)
        if not isinstance(error, QueueFull):
            routed.failed_workers |= {worker_id}
        actions = self._drop_target(routed)
        assert move.target.transfer_id is not None
        resume = events.ResumeSequence(source.dispatch_id, source.candidate.decode_worker, move.target.transfer_id)
        return [*actions, resume]

    def _source_returned(
        self, routed: RoutedRequest, dispatch_id: str, result: DecodeResult | TandemError, now: float
    ) -> None:
        """The call of a source has ended after the target has taken over."""
        source = next(dispatch for dispatch in routed.left if dispatch.dispatch_id == dispatch_id)
        self._workers.remove_dispatch(source.candidate.decode_worker, dispatch_id)
        source.decode_open = False
        if isinstance(result, DecodeResult):
            source.decode = result
            if source.transfer_id is None:  # it has computed the prompt
                self._dispatches.end_read(source, result.read_tokens, now)
            routed.earlier.append(result)
            routed.kv_block_seconds += result.kv_block_seconds
            routed.num_recomputed_tokens += result.recomputed_tokens
            routed.unreported_since = now

    def _drop_target(self, routed: RoutedRequest) -> list[RouterAction]:
        move, routed.move = routed.move, None
        assert move is not None
        target = move.target
        del self.by_id[target.dispatch_id], self.by_call[target.call]
        self._workers.remove_dispatch(target.candidate.decode_worker, target.dispatch_id)
        self.outcomes[MoveOutcome(move.reason, "failed")] += 1
        return [events.CancelDispatch(target.dispatch_id)] if target.decode_open else []

    def check(self, requests: Collection[RoutedRequest]) -> None:
        known = {r.move.target.dispatch_id for r in requests if r.move is not None}
        known |= {source.dispatch_id for r in requests for source in r.left}
        assert self.by_id.keys() == known
        assert len(self.by_call) == len(known)
        assert all(r.dispatch is not None for r in requests if r.move is not None or r.left)
