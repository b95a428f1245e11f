"""The decode worker: pulled KV blocks in, tokens out.

    with a source:    DecodeArrived -> wait for target blocks -> pull -> running -> tokens ... -> DecodeDone
    without a source: DecodeArrived -> queue -> prefill here ---------^
                                    `-> read the prefix that a peer has cached -> queue       (worker/prefixes.py)

A worker that drains sends back what it has not begun, and asks the routers to move what runs (decode_worker/moves.py).
A move arrives as a hand-off whose source is a decode worker: it grows until it completes.

decode_worker/pull_queue.py gives target blocks to hand-offs, in rank order, and says why no two of them wait for each
other. The target blocks stay reserved until the pull has ended, even if the call ends first, because a read may still
write to them. A failed hand-off ends the call with `TransferFailed`, and the router decides whether to retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerDrains,
)
from core.handoff import AbortReason, TransferId
from core.lifecycle import FinishReason, Stage
from core.machine import Tick
from core.scheduling.block_pool import Column
from core.scheduling.ledger import Claim, SequenceState, check_claims
from core.scheduling.sequence import Rank, Sequence
from core.scheduling.worker_load import WorkerLoad
from core.step import SampledToken, StepOutput, TokenEvent
from decode_worker.events import (
    DecodeAction,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeEvent,
    DecodeFailed,
    EmitTokens,
    HandedOver,
    HandoffArrived,
    MoveArrived,
    ResumeArrived,
)
from decode_worker.moves import MoveAction, MoveEnded, Moves
from decode_worker.pull_queue import PulledPrompt, PullQueue
from decode_worker.room import num_short
from kv_transfer.protocol.events import (
    CaughtUp,
    OfferEnded,
    PullCompleted,
    PullFailed,
    PullGivenUp,
    PullStats,
    TargetsNeeded,
)
from kv_transfer.protocol.machine import TransferMachine
from worker.core import ConfigChanged, DrainRequested, StepFailed, StepFinished, WorkerCore, claim_of
from worker.prefixes import PrefixAction, Prefixes, PrefixRequested
from worker.tier.events import BlocksCopied, BlocksRead, BlocksWritten, SlotErased

LOST_ITS_BLOCKS = "the KV hand-off lost its blocks to a sequence that ranks higher"


@dataclass(slots=True)
class _OpenCall:
    sequence: Sequence
    transfer_id: TransferId | None  # of its hand-off
    pull: PullStats | None = None


@dataclass(slots=True)
class DecodeMachine:
    """Answers each accepted `DecodeArrived` with one `DecodeDone` or `DecodeFailed`, at its deadline at the latest."""

    core: WorkerCore
    transfers: TransferMachine
    max_pulls_waiting: int
    pulls: PullQueue = field(init=False)
    moves: Moves = field(init=False)
    prefixes: Prefixes = field(init=False)
    _calls: dict[str, _OpenCall] = field(default_factory=dict)  # open calls, by request id

    def __post_init__(self) -> None:
        self.pulls = PullQueue(self.core.scheduler, self.core.pool)
        self.moves = Moves(self.core, self.transfers)
        self.prefixes = Prefixes(self.core, self.transfers)

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        """Raises `TandemError` if it refuses a `DecodeArrived`, a `MoveArrived` or a `PrefixRequested`."""
        actions: list[DecodeAction] = []
        match event:
            case DecodeArrived():
                actions += self._on_arrived(event, now)
            case DecodeCancelled(request_id):
                cancelled = RequestCancelled("the router cancelled the call")
                actions += self._end(request_id, cancelled, AbortReason.CANCELLED, now)
            case HandoffArrived():
                raise InvalidRequest(
                    "handoff", "this worker pulls KV blocks by itself and takes no hand-off of an engine"
                )
            case MoveArrived():
                actions += self._apply_results(self.moves.start(event, now), now)
            case ResumeArrived():
                actions += self._apply_results(self.moves.resume(event, now), now)
            case StepFinished(output):
                actions += self._on_step(output, now)
            case StepFailed(error):
                for sequence in self.core.fail_step(now):
                    actions += self._end(sequence.sequence_id, error, AbortReason.CANCELLED, now)
                actions += self._apply_results(self.moves.advance(now), now)
            case DrainRequested():
                self.core.draining = True
                for sequence in [*self.core.unbegun(), *self.prefixes.waiting]:
                    drains = WorkerDrains("this decode worker drains, and has not begun with the request")
                    actions += self._end(sequence.sequence_id, drains, AbortReason.CANCELLED, now)
            case ConfigChanged(scheduler, worker):
                self.core.scheduler.set_config(scheduler)
                self.max_pulls_waiting = worker.max_pulls_waiting
            case PrefixRequested():
                if self.core.draining and not self._calls:
                    raise WorkerDrains("this decode worker has drained")  # else it would never be idle
                actions += self._apply_results(self.prefixes.offer(event, self._num_spare_blocks(), now), now)
            case BlocksCopied() | BlocksWritten() | BlocksRead() | SlotErased():
                actions += self._apply_results(self.prefixes.on_disk(event, now), now)
            case Tick():
                actions += self._apply_results([*self.transfers.handle(event, now), *self.moves.advance(now)], now)
                actions += self._apply_results(self.prefixes.on_tick(now), now)
                for request_id in self.core.open_calls.deadlines.expire(now):
                    stage = self.core.open_calls.timelines[request_id].stage.value
                    late = DeadlineExceeded(f"the deadline passed on the decode worker in stage {stage}")
                    actions += self._end(request_id, late, AbortReason.DEADLINE, now)
            case _:
                actions += self._apply_results(self.transfers.handle(event, now), now)
        while given_up := self.prefixes.give_way(self._num_spare_blocks, now):
            actions += self._apply_results(given_up, now)
        actions += self._give_blocks(now)
        steps = self.core.next_step(now, admit_before=self.pulls.blocked_rank)
        while (victim := self.pulls.victim(now)) is not None:
            if isinstance(victim, Sequence):
                self.core.scheduler.preempt(victim)
            else:
                lost = TransferFailed(LOST_ITS_BLOCKS)
                actions += self._end(victim.sequence.sequence_id, lost, AbortReason.OVERLOADED, now)
            actions += self._give_blocks(now)
            steps += self.core.next_step(now, admit_before=self.pulls.blocked_rank)
        asked = self.moves.ask_to_leave(now) if self.core.draining else []
        written = self.prefixes.write_down(self._num_spare_blocks, now)
        # The step runs during the other actions.
        return [*self.prefixes.take_given_up(), *steps, *actions, *asked, *written]

    def next_deadline(self) -> float | None:
        parts = (self.core, self.transfers, self.pulls, self.moves, self.prefixes)
        known = [part.next_deadline() for part in parts]
        return min((when for when in known if when is not None), default=None)

    @property
    def idle(self) -> bool:
        return not (self._calls or self.pulls.by_id or self.transfers.alive or self.prefixes.pulls)

    @property
    def transfers_alive(self) -> bool:
        return self.transfers.alive

    def load(self) -> WorkerLoad:
        return self.core.load(
            self.transfers,
            num_pulls_waiting=self.pulls.num_waiting,
            num_promised_blocks=self.pulls.num_promised_blocks() + self.core.num_prompt_blocks(),
            prompts_left=self.prefixes.prompts_left(),
            takes_moves=True,
        )

    def claims(self) -> list[Claim]:
        """Every holder of blocks, and every live transfer."""
        pulled = [
            claim_of(pull.sequence, SequenceState.ENDING if pull.call_ended else SequenceState.TRANSFER)
            for pull in self.pulls.by_id.values()
        ]
        return [*self.core.claims(), *pulled, *self.prefixes.claims(), *self.transfers.claims()]

    def _num_spare_blocks(self, before: Rank | None = None) -> int:
        return self.core.num_spare_blocks(self.pulls.num_promised_blocks(before), before)

    # ---- a sequence arrives

    def _on_arrived(self, event: DecodeArrived, now: float) -> list[DecodeAction]:
        if self.core.draining:
            raise WorkerDrains("this decode worker drains")
        sequence = self.core.admit(event.request, event.deadline, now, call=event.call)
        try:
            actions = self._enqueue(sequence, event, now)
        except TandemError:
            self.core.undo_admit(sequence)
            raise
        self._calls[sequence.sequence_id] = _OpenCall(sequence, None if event.source is None else event.source[0])
        return actions

    def _enqueue(self, sequence: Sequence, event: DecodeArrived, now: float) -> list[DecodeAction]:
        if event.source is None:
            self.core.scheduler.refuse(sequence)
            return self._apply_results(self.prefixes.add(sequence, event.prefix, self._num_spare_blocks, now), now)
        self.core.scheduler.refuse_oversized(sequence)
        if self.pulls.num_waiting >= self.max_pulls_waiting:
            raise QueueFull(f"{self.max_pulls_waiting} hand-offs already wait for room (max_pulls_waiting)")
        transfer_id, owner = event.source
        reserved = self.transfers.reserve_pull(transfer_id, owner, now)
        actions = self._apply_results(reserved, now)
        self.pulls.add(sequence, transfer_id, is_growing=event.is_move)
        return actions

    # ---- hand-offs

    def _give_blocks(self, now: float) -> list[DecodeAction]:
        """Admit hand-offs that have room now, and give targets for announced blocks."""
        actions: list[DecodeAction] = []
        for pull, targets in self.pulls.give_blocks():
            sequence = pull.sequence
            num_blocks = len(sequence.block_table) + len(pull.targets)
            self.core.held_blocks.note(sequence.sequence_id, num_blocks, now)
            if targets is None:
                self.core.open_calls.enter(sequence.sequence_id, Stage.TRANSFER, now)
                positions = range(len(sequence.block_table), pull.num_positions)
                num_tokens, num_known, num_new = sequence.num_tokens, None, 1
                if pull.is_growing:
                    num_tokens, num_known = pull.num_positions * self.core.scheduler.block_size, num_tokens
                    num_new = sequence.max_num_tokens - sequence.num_tokens
                asked = self.transfers.puller.start(
                    pull.transfer_id, positions, now, num_tokens, num_known, max_new_tokens=num_new
                )
                actions += self._apply_results(asked, now)
            else:
                actions += self._apply_results(self.transfers.puller.add_targets(pull.transfer_id, targets, now), now)
        return actions

    def _apply_results(self, actions: Iterable[PrefixAction | MoveAction], now: float) -> list[DecodeAction]:
        """Act on the results of pulls and moves. Returns the actions that follow, and the other actions unchanged."""
        mine: list[DecodeAction] = []
        for action in actions:
            match action:
                case PullCompleted() | PullFailed() | PullGivenUp() if self.prefixes.owns(action):
                    self.prefixes.end(action, now)
                case PullCompleted():
                    mine += self._on_pulled(action, now)
                case TargetsNeeded(transfer_id, positions, is_last):
                    self.pulls.announce(transfer_id, positions, is_last=is_last)
                case PullGivenUp():
                    mine += self._fail_pulled_call(self.pulls.by_id[action.transfer_id], action)
                case PullFailed():
                    mine += self._on_pull_failed(action)
                case CaughtUp(transfer_id):
                    mine += self._apply_results(self.moves.pause(transfer_id, now), now)
                case OfferEnded():
                    mine += self._apply_results(self.moves.on_offer_ended(action, now), now)
                case MoveEnded():
                    mine += self._on_move_ended(action, now)
                case _:
                    mine.append(action)
        return mine

    def _on_pulled(self, done: PullCompleted, now: float) -> list[DecodeAction]:
        pull = self.pulls.remove(done.transfer_id)
        sequence = pull.sequence
        name, token_ids = sequence.sequence_id, done.token_ids
        assert not pull.call_ended, "the pull of an ended call completed, though it was cancelled or had failed"
        index = sequence.num_tokens - sequence.request.num_prompt_tokens
        sequence.token_ids += token_ids
        num_computed = sequence.num_tokens - 1 if token_ids or pull.is_growing else sequence.num_tokens
        num_positions = -(-num_computed // self.core.scheduler.block_size)
        blocks = [pull.targets[position] for position in range(len(sequence.block_table), num_positions)]
        self.core.pool.arrive(blocks)
        sequence.block_table += blocks
        sequence.num_computed_tokens = num_computed
        self.core.scheduler.blocks.register_full_blocks(sequence)  # for the other choices of the call
        if not (token_ids or pull.is_growing):
            self.core.scheduler.drop_blocks(sequence)
            return self._fail_call(name, TransferFailed("the hand-off delivered no first token"))
        self.core.open_calls.enter(name, Stage.DECODE, now)
        self._calls[name].pull = done.stats
        finish_reason = sequence.finish_reason_after(sequence.token_ids[-1], self.core.scheduler.eos_token_ids)
        known = [TokenEvent(name, place, SampledToken(token), None) for place, token in enumerate(token_ids, index)]
        actions: list[DecodeAction] = [EmitTokens(tuple(known))] if known else []
        if pull.is_growing:
            actions.append(HandedOver(name, index + len(token_ids)))
        if finish_reason is not None:
            self.core.scheduler.drop_blocks(sequence)
            return actions + self._finish_call(name, finish_reason, now)
        self.core.scheduler.add(sequence)  # cannot fail: checked on arrival; `max_waiting` does not apply
        return actions

    def _on_move_ended(self, ended: MoveEnded, now: float) -> list[DecodeAction]:
        if ended.error is not None:
            return self._end(ended.request_id, ended.error, AbortReason.LEASE_EXPIRED, now)
        self.core.scheduler.abort(ended.request_id)
        return self._finish_call(ended.request_id, FinishReason.HANDOFF, now)

    def _on_pull_failed(self, failed: PullFailed) -> list[DecodeAction]:
        pull = self.pulls.remove(failed.transfer_id)
        self.core.pool.cancel_reservation(pull.targets.values())
        self.core.scheduler.drop_blocks(pull.sequence)
        return self._fail_pulled_call(pull, failed)

    def _fail_pulled_call(self, pull: PulledPrompt, failed: PullGivenUp | PullFailed) -> list[DecodeAction]:
        if pull.call_ended:
            return []
        self.pulls.end_call(pull)
        message = f"the KV hand-off failed: {failed.reason.value}"
        return self._fail_call(
            pull.sequence.sequence_id, TransferFailed(f"{message} ({failed.detail})" if failed.detail else message)
        )

    # ---- tokens and ends of calls

    def _on_step(self, output: StepOutput, now: float) -> list[DecodeAction]:
        tokens = self.core.complete_step(output, now)
        actions: list[DecodeAction] = []
        for request_id, error in output.failed.items():
            actions += self._end(request_id, error, AbortReason.CANCELLED, now)
        if tokens:
            actions.append(EmitTokens(tuple(tokens)))
        for event in tokens:
            if event.finish_reason is not None:
                actions += self._finish_call(event.sequence_id, event.finish_reason, now)
        if not self.core.draining:
            actions += self._make_room(now)
        return actions + self._apply_results(self.moves.advance(now), now) if self.moves.by_id else actions

    def _make_room(self, now: float) -> list[DecodeAction]:
        """Offer sequences that preemption would take, and pause those that move before one is preempted."""
        num_lacking = num_short(self.core, self.pulls, self.transfers, self.prefixes.num_targets)
        asked = self.moves.ask_for_room(num_lacking, now)
        if self.moves.by_id and self.core.pool.num_available < len(self.core.scheduler.running):
            return [*asked, *self._apply_results(self.moves.pause_all(now), now)]
        return [*asked]

    def _finish_call(self, request_id: str, reason: FinishReason, now: float) -> list[DecodeAction]:
        call = self._calls.pop(request_id)
        move = self.moves.by_id.get(request_id)
        timeline, record, sequence = (
            self.core.open_calls.timelines[request_id],
            self.core.open_calls.records[request_id],
            call.sequence,
        )
        self.core.open_calls.enter(request_id, Stage.FINISHED, now)
        kv_block_seconds = self.core.held_blocks.read(request_id, now)
        self.core.forget_request(request_id)
        num_cached, block_size = sequence.num_cached_tokens, self.core.scheduler.block_size
        done = DecodeDone(
            request_id,
            reason,
            num_cached,
            timeline,
            call.pull,
            kv_block_seconds,
            num_skipped_blocks=0 if call.pull is None else num_cached // block_size,
            num_prompt_tokens=len(sequence.request.token_ids),
            num_blocks=-(-sequence.num_tokens // block_size),
            num_preemptions=sequence.num_preemptions,
            num_drafts=sequence.num_drafts,
            num_right_drafts=sequence.num_right_drafts,
            num_recomputed_tokens=sequence.num_recomputed_tokens,
            moved_bytes=0 if move is None else move.num_announced * self.transfers.address.layout.block_bytes,
            prefix=self.prefixes.take_pulled(request_id),
            record=record,
        )
        return [done, *self._apply_results(self.moves.forget(request_id), now)]

    def _end(self, request_id: str, error: TandemError, reason: AbortReason, now: float) -> list[DecodeAction]:
        """End an open call early. An open pull keeps its target blocks until its reads have ended."""
        if request_id not in self._calls:
            return []
        self.core.scheduler.abort(request_id)
        transfer_id = self._calls[request_id].transfer_id
        read = self.prefixes.cancel(request_id, reason, now)
        actions = [*self._fail_call(request_id, error), *self._apply_results(read, now)]
        actions += self._apply_results(self.moves.forget(request_id), now)
        pull = None if transfer_id is None else self.pulls.by_id.get(transfer_id)
        if pull is not None:
            self.pulls.end_call(pull)
            actions += self._apply_results(self.transfers.puller.cancel(pull.transfer_id, reason, now), now)
        return actions

    def _fail_call(self, request_id: str, error: TandemError) -> list[DecodeAction]:
        del self._calls[request_id]
        self.core.forget_request(request_id)
        return [DecodeFailed(request_id, error)]

    def check(self) -> None:
        """Each open call is in the scheduler or waits for a pull, and the pulls have all INCOMING blocks."""
        self.core.check()
        self.transfers.check()
        check_claims(self.claims(), self.core.pool)
        self.pulls.check()
        self.moves.check()
        self.prefixes.check()
        assert self.core.open_calls.timelines.keys() == self._calls.keys()
        pulls = self.pulls.by_id.values()
        pulled = {pull.sequence.sequence_id for pull in pulls if not pull.call_ended}
        pulled |= {sequence.sequence_id for sequence in self.prefixes.waiting}
        for request_id in self._calls:
            assert (self.core.scheduler.get(request_id) is not None) != (request_id in pulled)
        num_targets = sum(len(pull.targets) for pull in pulls) + self.prefixes.num_targets
        assert num_targets == self.core.pool.ledger()[Column.INCOMING]
