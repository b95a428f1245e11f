"""Moves of running requests from one decode worker to another. The router that has the request decides.

    the source asks --> the target's Decode call, and the reader for the source: `RoutedRequest.move`
        the target sends tokens, or the source ends after it has handed over --> the target's call is the current one
        the target's call fails before the router takes a token of it        --> ResumeSequence: the source samples on

The current dispatch is that of the source until `take_over`. Afterwards the source only repeats what the target says
too, and its call ends when the target has released the blocks. Laws:

  1. A token of the target ends the part of the source: the router never sends ResumeSequence after it.
  2. A source that fails after it has handed over fails nothing: the target goes on, or its own call fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from core.errors import QueueFull, TandemError, WorkerUnavailable
from core.lifecycle import MoveReason, Stage
from router.requests import events
from router.requests.events import DecodeResult, RouterAction
from router.requests.open_dispatches import OpenDispatches
from router.requests.routed_request import Dispatch, Move, RoutedRequest
from router.routing.worker_record import CallWork
from router.routing.workers import WorkerTable, hashes_of

MIN_TOKENS_LEFT = 2  # with fewer tokens to come, a request ends where it is


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

    def start(self, routed: RoutedRequest, reason: MoveReason, now: float) -> list[RouterAction]:
        """The worker of the current dispatch asks for a move. Does nothing without a worker that has room."""
        source = routed.dispatch
        if source is None or not self._can_move(routed, source):
            return []
        request, worker_id = routed.resumed(), source.candidate.decode_worker
        avoid = routed.failed_workers
        target = self._workers.choose_target(hashes_of(request), request.max_total_tokens, worker_id, avoid, now)
        if target is None:
            self.outcomes[MoveOutcome(reason, "no_room")] += 1
            return []
        dispatch = self._dispatches.open_move(routed, target.decode_worker, now)
        routed.move = Move(dispatch, reason)
        self.by_id[dispatch.dispatch_id] = self.by_call[dispatch.call] = routed
        reader, owner = self._workers.chosen(target.decode_worker), self._workers.chosen(worker_id)
        reader.add_call(dispatch.dispatch_id, dispatch.call, CallWork(num_blocks=target.transfer_blocks))
        ticket, timeout_s = dispatch.transfer_id, max(0.0, routed.deadline - now)
        assert ticket is not None
        return [
            events.StartDecode(
                dispatch.dispatch_id, reader.worker_id, request.derive(request_id=dispatch.dispatch_id),
                (ticket, owner.agent), timeout_s, dispatch.call, is_move=True,
            ),
            events.StartMove(
                dispatch.dispatch_id, source.dispatch_id, worker_id, ticket, reader.agent, len(request.token_ids)
            ),
        ]  # fmt: skip

    def _can_move(self, routed: RoutedRequest, source: Dispatch) -> bool:
        """It decodes, has a while to go, and does not move already."""
        num_left = routed.request.sampling.max_tokens - len(routed.delivered)
        is_decoding = routed.timeline.stage is Stage.DECODE and not source.prefill_open and source.decode is None
        knows_worker = self._workers.get(source.candidate.decode_worker) is not None
        return is_decoding and routed.move is None and num_left >= MIN_TOKENS_LEFT and knows_worker

    def take_over(self, routed: RoutedRequest) -> Dispatch:
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
        self.outcomes[MoveOutcome(move.reason, "moved")] += 1
        return source

    def accept(self, routed: RoutedRequest, call: int, index: int) -> bool:
        """Whether a token of a call of `by_call` counts. The first token of a target makes the target take over."""
        if routed.move is not None and routed.move.target.call == call:
            self.take_over(routed)
            return True
        source = next(dispatch for dispatch in routed.left if dispatch.call == call)
        return source.end_index is None or index < source.end_index

    def note_handed_over(self, routed: RoutedRequest, call: int, first_index: int) -> None:
        """The source, or the target, says where the part of the target begins."""
        if routed.move is not None:
            routed.move.first_index = first_index
            if call == routed.move.target.call:
                self.take_over(routed)
        elif routed.left and routed.dispatch is not None and routed.dispatch.call == call:
            routed.left[-1].end_index = first_index

    def fail_target(self, routed: RoutedRequest, error: TandemError) -> list[RouterAction]:
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

    def source_returned(self, routed: RoutedRequest, dispatch_id: str, result: DecodeResult | TandemError) -> None:
        """The call of a source has ended after the target has taken over."""
        source = next(dispatch for dispatch in routed.left if dispatch.dispatch_id == dispatch_id)
        self._workers.remove_dispatch(source.candidate.decode_worker, dispatch_id)
        source.decode_open = False
        if isinstance(result, DecodeResult):
            source.decode = result
            routed.earlier.append(result)
            routed.kv_block_seconds += result.kv_block_seconds
            routed.num_recomputed_tokens += result.recomputed_tokens

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
