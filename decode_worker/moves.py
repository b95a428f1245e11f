"""The owner's half of a move: a running sequence goes on at another decode worker, with its KV.

    ask --MoveArrived--> COPYING --caught up, or wanted blocks full--> PAUSING --no step in flight--> HANDED_OVER
           full blocks are offered, new ones when filled         no step plans it        the last READY is sent

    COPYING, PAUSING   the offer ends, or ResumeArrived               the sequence runs here as before
    HANDED_OVER        RELEASE with a reason, or ResumeArrived        likewise
                       RELEASE                                        the call ends as moved
                       none of these for lease_s                      the call ends with an error

Law: each index of the output has one author. The last READY has every token that this worker has sampled. From then on
the target may sample, so this worker samples again only if the target has released the blocks with a reason, or if the
router says that it has ended the call of the target.

A worker that drains asks for its running sequences, a few at once (decode_worker/move_asks.py). A worker that will run
short of blocks (decode_worker/room.py) asks for those that preemption would take, lowest rank first, and once it has no
free block left it pauses the sequences that move before it preempts another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from core.errors import LayoutMismatch, TransferFailed
from core.handoff import AbortReason, TransferId
from core.lifecycle import MoveReason, Stage
from core.scheduling.sequence import Sequence
from decode_worker.events import AskToMove, HandedOver, MoveArrived, ResumeArrived
from decode_worker.move_asks import MIN_TOKENS_LEFT, ROOM_WAIT_S, MoveAsks
from kv_transfer.protocol.events import OfferEnded, TransferAction
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.offer import Offer
from worker.core import WorkerCore


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """The call cannot go on here. `error`: of a move whose result is not known; None: the reader has everything."""

    request_id: str
    error: TransferFailed | None = None


MoveAction = HandedOver | MoveEnded


class MoveState(Enum):
    COPYING = "copying"
    PAUSING = "pausing"  # no step plans the sequence any more; steps in flight may contain it
    HANDED_OVER = "handed_over"


@dataclass(slots=True, eq=False)
class Move:
    sequence: Sequence
    transfer_id: TransferId
    num_known_tokens: int  # to the reader
    since: float  # of the state
    state: MoveState = MoveState.COPYING
    num_offered: int = 0  # leading blocks of the sequence
    num_announced: int = 0  # blocks that the reader lacked; known once the sequence is handed over


class Moves:
    """The moves of sequences of `core`. `core.scheduler` keeps the sequences until their calls end."""

    def __init__(self, core: WorkerCore, transfers: TransferMachine) -> None:
        self._core, self._transfers = core, transfers
        self.by_id: dict[str, Move] = {}  # by request id
        self._asks = MoveAsks()

    # ---- from the router

    def start(self, event: MoveArrived, now: float) -> list[TransferAction]:
        """Raises `TransferFailed` if the sequence cannot move now, `LayoutMismatch`, or `QueueFull`."""
        sequence = self._core.scheduler.get(event.request_id)
        if sequence is None or not self._can_move(sequence) or event.num_tokens > sequence.num_tokens:
            raise TransferFailed(f"{event.request_id} cannot move now")
        own = self._transfers.address.layout
        if event.reader.layout != own:
            raise LayoutMismatch(own.differences(event.reader.layout))
        deadline = self._core.open_calls.deadlines.when(event.request_id)
        actions = self._transfers.offer(event.transfer_id, event.reader, deadline, now)
        move = self.by_id[event.request_id] = Move(sequence, event.transfer_id, event.num_tokens, now)
        sequence.is_moving = True
        return actions + self._offer_full_blocks(move, now)

    def resume(self, event: ResumeArrived, now: float) -> list[TransferAction]:
        """Sample on here. Does nothing for a move that has ended."""
        move = self.by_id.get(event.request_id)
        if move is None or move.transfer_id != event.transfer_id:
            return []
        self._run_on(move, now)
        actions = self._transfers.owner.abort(move.transfer_id, AbortReason.CANCELLED, "the router ended the move")
        if move.state is MoveState.HANDED_OVER and move.transfer_id in self._transfers.owner.offers:
            self._core.scheduler.give_up_last_block(move.sequence)  # the reader may still read it
        return actions

    # ---- from the machine

    def ask_to_leave(self, now: float) -> list[AskToMove]:
        """The sequences that could move next. Call it after each event of a worker that drains."""
        movable = [sequence.sequence_id for sequence in self._core.scheduler.running if self._can_move(sequence)]
        return self._asks.ask_to_leave(movable, len(self.by_id), now)

    def ask_for_room(self, num_short: int, now: float) -> list[AskToMove]:
        """The lowest-ranked sequences, until the blocks of all that move or are asked for make up for `num_short`."""
        movable: list[str] = []
        for sequence in reversed(self._core.scheduler.running[1:]):
            if num_short <= 0:
                break
            if sequence.sequence_id in self.by_id or not self._asks.may_ask(sequence.sequence_id, now):
                num_short -= len(sequence.block_table)
            elif self._can_move(sequence):
                movable.append(sequence.sequence_id)
                num_short -= len(sequence.block_table)
        return self._asks.ask(movable, len(self.by_id), MoveReason.ROOM, now)

    def pause_all(self, now: float) -> list[TransferAction | MoveAction]:
        """Hand over what the readers have room for, so that it takes no more blocks here."""
        actions: list[TransferAction | MoveAction] = []
        for move in list(self.by_id.values()):
            offer = self._offer_of(move)
            if move.state is MoveState.COPYING and offer is not None and offer.wanted is not None:
                actions += self._pause(move, now)
        return actions

    def advance(self, now: float) -> list[TransferAction | MoveAction]:
        """Call it after each step and each Tick."""
        actions: list[TransferAction | MoveAction] = []
        for move in list(self.by_id.values()):
            match move.state:
                case MoveState.COPYING:
                    actions += self._copy(move, now)
                case MoveState.PAUSING:
                    actions += self._hand_over_if_still(move, now)
                case MoveState.HANDED_OVER if now >= move.since + self._lease_s:
                    lost = TransferFailed("the reader of the move has neither released the blocks nor failed in time")
                    actions.append(MoveEnded(move.sequence.sequence_id, lost))
        return actions

    def pause(self, transfer_id: TransferId, now: float) -> list[TransferAction | MoveAction]:
        """The reader has caught up."""
        move = self._move_of(transfer_id)
        return [] if move is None or move.state is not MoveState.COPYING else self._pause(move, now)

    def on_offer_ended(self, ended: OfferEnded, now: float) -> list[MoveEnded]:
        move = self._move_of(ended.transfer_id)
        if move is None:
            return []
        if move.state is not MoveState.HANDED_OVER or (ended.is_released and ended.reason is not None):
            self._run_on(move, now)
            return []
        if ended.is_released:
            return [MoveEnded(move.sequence.sequence_id)]
        lost = TransferFailed("the lease of the move ended without a sign of its reader")
        return [MoveEnded(move.sequence.sequence_id, lost)]

    def forget(self, request_id: str) -> list[TransferAction]:
        """The call has ended. The reader of a sequence that is not handed over cannot get it any more."""
        self._asks.forget(request_id)
        move = self.by_id.pop(request_id, None)
        if move is None or move.state is MoveState.HANDED_OVER:
            return []
        return self._transfers.owner.abort(move.transfer_id, AbortReason.CANCELLED, "the call of the owner has ended")

    def next_deadline(self) -> float | None:
        limits = {MoveState.COPYING: ROOM_WAIT_S, MoveState.HANDED_OVER: self._lease_s}
        due = [move.since + limits[move.state] for move in self.by_id.values() if self._has_limit(move)]
        if (again_at := self._asks.next_deadline()) is not None:
            due.append(again_at)
        return min(due, default=None)

    # ---- inside

    @property
    def _lease_s(self) -> float:
        return self._transfers.address.lease_s

    def _has_limit(self, move: Move) -> bool:
        if move.state is MoveState.COPYING:
            return (offer := self._offer_of(move)) is not None and offer.wanted is None
        return move.state is MoveState.HANDED_OVER

    def _offer_of(self, move: Move) -> Offer | None:
        return self._transfers.owner.offers.get(move.transfer_id)

    def _move_of(self, transfer_id: TransferId) -> Move | None:
        return next((move for move in self.by_id.values() if move.transfer_id == transfer_id), None)

    def _can_move(self, sequence: Sequence) -> bool:
        """True if the sequence is in decode, and has enough tokens left to be worth a move."""
        name, queues = sequence.sequence_id, self._core.scheduler.queues
        is_decode = name not in queues.prefilling and sequence.num_uncomputed_tokens <= 1
        num_left = sequence.max_num_tokens - sequence.num_tokens
        is_running = is_decode and bool(sequence.block_table) and sequence.finish_reason is None
        return is_running and name not in self.by_id and num_left >= MIN_TOKENS_LEFT

    def _offer_full_blocks(self, move: Move, now: float) -> list[TransferAction]:
        """Full blocks of computed tokens are never written again, whatever steps are planned."""
        sequence, first = move.sequence, move.num_offered
        move.num_offered = sequence.num_computed_tokens // self._core.scheduler.block_size
        if move.num_offered == first:
            return []
        blocks = [(position, sequence.block_table[position]) for position in range(first, move.num_offered)]
        return self._transfers.owner.add_ready(move.transfer_id, blocks, False, (), now)

    def _copy(self, move: Move, now: float) -> list[TransferAction | MoveAction]:
        offer, sequence = self._offer_of(move), move.sequence
        if offer is None or offer.aborting is not None:
            self._run_on(move, now)
            return []
        actions: list[TransferAction | MoveAction] = [*self._offer_full_blocks(move, now)]
        if offer.wanted is None:
            if now >= move.since + ROOM_WAIT_S:
                actions += self._transfers.owner.abort(move.transfer_id, AbortReason.OVERLOADED, "no room in time")
            return actions
        block_size = self._core.scheduler.block_size
        num_wanted = max(-(-move.num_known_tokens // block_size), max(offer.wanted, default=-1) + 1)
        if sequence.num_planned_tokens > num_wanted * block_size:
            detail = "the sequence has outgrown the wanted blocks"
            return actions + self._transfers.owner.abort(move.transfer_id, AbortReason.OVERLOADED, detail)
        sequence.plan_end = min(sequence.max_num_tokens, num_wanted * block_size + 1)
        if sequence.is_held_back and sequence.plan_end < sequence.max_num_tokens:
            actions += self._pause(move, now)
        return actions

    def _pause(self, move: Move, now: float) -> list[TransferAction | MoveAction]:
        move.state, move.since, move.sequence.plan_end = MoveState.PAUSING, now, 0
        self._core.open_calls.enter(move.sequence.sequence_id, Stage.MOVE, now)
        return self._hand_over_if_still(move, now)

    def _hand_over_if_still(self, move: Move, now: float) -> list[TransferAction | MoveAction]:
        """Offer the rest once no step in flight contains the sequence."""
        sequence, offer = move.sequence, self._offer_of(move)
        if sequence.num_planned_tokens != sequence.num_computed_tokens:
            return []
        if offer is None or offer.aborting is not None:
            self._run_on(move, now)
            return []
        num_blocks = -(-sequence.num_computed_tokens // self._core.scheduler.block_size)
        blocks = [(position, sequence.block_table[position]) for position in range(move.num_offered, num_blocks)]
        token_ids = tuple(sequence.token_ids[move.num_known_tokens :])
        offered = self._transfers.owner.add_ready(move.transfer_id, blocks, True, token_ids, now)
        move.state, move.since, move.num_announced = MoveState.HANDED_OVER, now, offer.num_announced
        first_index = sequence.num_tokens - sequence.request.num_prompt_tokens
        return [*offered, HandedOver(sequence.sequence_id, first_index)]

    def _run_on(self, move: Move, now: float) -> None:
        """The move is over, and the sequence runs here as before."""
        sequence = move.sequence
        del self.by_id[sequence.sequence_id]
        sequence.is_moving, sequence.plan_end = False, sequence.max_num_tokens
        self._asks.note_ended(sequence.sequence_id, now)
        if move.state is not MoveState.COPYING:
            self._core.open_calls.enter(sequence.sequence_id, Stage.DECODE, now)

    def check(self) -> None:
        for request_id, move in self.by_id.items():
            sequence = self._core.scheduler.get(request_id)
            assert sequence is move.sequence, f"{request_id} moves without a sequence"
            assert sequence.is_moving
            assert sequence in self._core.scheduler.running, "a preempted sequence moves"
            if move.state is not MoveState.COPYING:
                assert sequence.plan_end == 0, "a step may plan a paused sequence"
            if move.state is MoveState.HANDED_OVER:
                assert sequence.num_planned_tokens == sequence.num_computed_tokens, "a step contains it"
        assert self._asks.asked <= self._core.open_calls.timelines.keys()
        moving = {s.sequence_id for s in self._core.scheduler.queues.by_id.values() if s.is_moving}
        ending = self._core.scheduler.queues.ending.keys()
        assert moving - ending == self.by_id.keys()
        assert len({move.transfer_id for move in self.by_id.values()}) == len(self.by_id)
