"""The prefill worker: prompts in, first token and offered KV blocks out.

    PrefillArrived -> queue -> chunks -> first token -> PrefillDone      (the call ends here)
                               |  each full block is offered to the reader as soon as it is computed
                               +--> the reader pulls and releases, or its lease ends

A call may name a peer that has cached a part of the prompt; that part is read first (worker/prefixes.py).

The sequence leaves the scheduler with its first token. Its blocks stay leased until the reader has read them. The
machine leases blocks before it completes the step, because the scheduler then releases the blocks of a finished
sequence.

Prompts and readers can deadlock: leased blocks wait for readers without free blocks, while these readers' workers hold
blocks for prompts that wait here for blocks. `_unblock` ends a deadlock: it withdraws offers until a prompt with a
ready reader can be computed. A heartbeat says whether a reader lacks blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from core.errors import DeadlineExceeded, RequestCancelled, TandemError, WorkerDrains
from core.handoff import AbortReason, AgentAddress, PrefixSource, TransferId
from core.lifecycle import FinishReason, Timeline
from core.machine import Tick
from core.request import Request
from core.scheduling.block_pool import Column
from core.scheduling.ledger import Claim, check_claims
from core.scheduling.sequence import Sequence
from core.scheduling.worker_load import NO_CALL, CallId, WorkerLoad
from core.step import SampledToken, ScheduledChunk, StepOutput
from kv_transfer.protocol.events import AgentAction, TransferEvent, TransferResult
from kv_transfer.protocol.machine import TransferMachine
from worker.call_record import CallRecord
from worker.core import ConfigChanged, DrainRequested, RunStep, StepFailed, StepFinished, WorkerCore
from worker.prefixes import PrefixAction, Prefixes, PrefixRequested, PulledPrefix, PullResult
from worker.tier.events import BlocksCopied, BlocksRead, BlocksWritten, SlotErased, TierAction, TierEvent

MAX_STALL_S = 1.0  # a prompt without blocks whose reader has room; beyond: another offer is withdrawn


@dataclass(frozen=True, slots=True)
class PrefillArrived:
    request: Request
    transfer_id: TransferId
    reader: AgentAddress
    deadline: float
    call: CallId = NO_CALL
    prefix: PrefixSource | None = None  # a peer that has cached what this worker has not


@dataclass(frozen=True, slots=True)
class PrefillCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class OfferWithdrawn:
    """No reader will come."""

    transfer_id: TransferId


PrefillEvent = (
    PrefillArrived
    | PrefillCancelled
    | OfferWithdrawn
    | StepFinished
    | StepFailed
    | ConfigChanged
    | DrainRequested
    | PrefixRequested
    | TransferEvent
    | TierEvent
    | Tick
)


@dataclass(frozen=True, slots=True)
class PrefillDone:
    request_id: str
    index: int  # of the token in the output
    token: SampledToken
    finish_reason: FinishReason | None  # None: the sequence continues on the decode worker
    cached_tokens: int
    timeline: Timeline
    num_tokens: int = 0  # of the prompt
    num_blocks: int = 0  # of the sequence
    record: CallRecord = field(default_factory=CallRecord)
    kv_block_seconds: float = 0.0  # of the sequence, up to now
    prefix: PulledPrefix | None = None  # from a peer
    handoff: bytes = b""  # for the engine of the decode worker, if the engines move the blocks by themselves


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    request_id: str
    error: TandemError


PrefillAction = RunStep | PrefillDone | PrefillFailed | AgentAction | TierAction


@dataclass(slots=True)
class _OpenCall:
    sequence: Sequence
    transfer_id: TransferId | None


class PrefillMachine:
    """Answers each accepted `PrefillArrived` with `PrefillDone` or `PrefillFailed`, at its deadline at the latest."""

    def __init__(self, core: WorkerCore, transfers: TransferMachine) -> None:
        self.core = core
        self.transfers = transfers
        self.prefixes = Prefixes(core, transfers)
        self._calls: dict[str, _OpenCall] = {}  # by request id
        self._stalled_since: float | None = None

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """Raises `TandemError` if it refuses a `PrefillArrived` or a `PrefixRequested`."""
        actions: list[PrefillAction] = []
        match event:
            case PrefillArrived():
                actions += self._on_arrived(event, now)
            case PrefillCancelled(request_id):
                actions += self._end(request_id, RequestCancelled("the router cancelled the call"), now)
            case OfferWithdrawn(transfer_id):
                actions += self._apply_results(self.transfers.owner.withdraw(transfer_id), now)
            case StepFinished(output):
                actions += self._on_step(output, now)
            case StepFailed(error):
                for sequence in self.core.fail_step(now):
                    actions += self._end(sequence.sequence_id, error, now)
            case DrainRequested():
                self.core.draining = True
                for sequence in [*self.core.unbegun(), *self.prefixes.waiting]:
                    drains = WorkerDrains("this prefill worker drains, and has not begun with the prompt")
                    actions += self._end(sequence.sequence_id, drains, now)
            case ConfigChanged(scheduler):
                self.core.scheduler.set_config(scheduler)
            case PrefixRequested():
                if self.core.draining and not self._calls:
                    raise WorkerDrains("this prefill worker has drained")  # else it would never be idle
                offered = self.prefixes.offer(event, self.core.num_spare_blocks(), now)
                actions += self._apply_results(offered, now)
            case BlocksCopied() | BlocksWritten() | BlocksRead() | SlotErased():
                actions += self._apply_results(self.prefixes.on_disk(event, now), now)
            case Tick():
                actions += self._apply_results(self.transfers.handle(event, now), now)
                actions += self._apply_results(self.prefixes.on_tick(now), now)
                for request_id in self.core.open_calls.deadlines.expire(now):
                    actions += self._end(request_id, DeadlineExceeded("the deadline passed during prefill"), now)
            case _:
                actions += self._apply_results(self.transfers.handle(event, now), now)
        while given_up := self.prefixes.give_way(partial(self.core.num_spare_blocks, 0), now):
            actions += self._apply_results(given_up, now)
        steps = [*self.core.next_step(now), *actions, *self._unblock(now)]  # the step runs during the other actions
        written = self.prefixes.write_down(self.core.num_spare_blocks, now)
        return [*self.prefixes.take_given_up(), *steps, *written]

    def next_deadline(self) -> float | None:
        stalled_until = None if self._stalled_since is None else self._stalled_since + MAX_STALL_S
        parts = (self.core, self.transfers, self.prefixes)
        known = [stalled_until, *(part.next_deadline() for part in parts)]
        return min((when for when in known if when is not None), default=None)

    @property
    def idle(self) -> bool:
        """No call is open, no reader has a lease, and no disk writes into a block."""
        return not (self._calls or self.transfers.alive or self.prefixes.pulls)

    @property
    def transfers_alive(self) -> bool:
        return self.transfers.alive

    def load(self) -> WorkerLoad:
        return self.core.load(self.transfers, prompts_left=self.prefixes.prompts_left())

    def claims(self) -> list[Claim]:
        """Every holder of blocks, and every live transfer."""
        return [*self.core.claims(), *self.prefixes.claims(), *self.transfers.claims()]

    # ---- prompts

    def _on_arrived(self, event: PrefillArrived, now: float) -> list[PrefillAction]:
        if self.core.draining:
            raise WorkerDrains("this prefill worker drains")
        sequence = self.core.admit(event.request, event.deadline, now, sample_limit=1, call=event.call)
        try:
            self.core.scheduler.refuse(sequence)
            offered = self.transfers.offer(event.transfer_id, event.reader, event.deadline, now)
        except TandemError:
            self.core.undo_admit(sequence)
            raise
        self._calls[sequence.sequence_id] = _OpenCall(sequence, event.transfer_id)
        read = self.prefixes.add(sequence, event.prefix, self.core.num_spare_blocks, now)
        return self._apply_results([*offered, *read], now)

    def _on_step(self, output: StepOutput, now: float) -> list[PrefillAction]:
        plan = self.core.scheduler.oldest_step
        assert plan is not None
        actions: list[PrefillAction] = []
        for chunk in plan.chunks:
            actions += self._offer_computed(chunk, output, now)
        tokens = self.core.complete_step(output, now)
        for request_id, error in output.failed.items():
            actions += self._end(request_id, error, now)
        for event in tokens:
            # The offer stays even if the first token ends the request: an abort could reach the reader before the
            # router has the answer, and the router would retry.
            call = self._calls.pop(event.sequence_id)
            goes_on = event.finish_reason is FinishReason.HANDOFF
            actions.append(
                PrefillDone(
                    request_id=event.sequence_id,
                    index=event.index,
                    token=event.token,
                    finish_reason=None if goes_on else event.finish_reason,
                    cached_tokens=call.sequence.num_cached_tokens,
                    timeline=self.core.open_calls.timelines[event.sequence_id],
                    num_tokens=call.sequence.num_tokens - 1,
                    num_blocks=-(-(call.sequence.num_tokens - 1) // self.core.scheduler.block_size),
                    record=self.core.open_calls.records[event.sequence_id],
                    kv_block_seconds=self.core.held_blocks.read(event.sequence_id, now),
                    prefix=self.prefixes.take_pulled(event.sequence_id),
                )
            )
            self.core.forget_request(event.sequence_id)
        return actions

    def _offer_computed(self, chunk: ScheduledChunk, output: StepOutput, now: float) -> list[PrefillAction]:
        """Offer the blocks that this step has filled; after the last chunk, the partly filled block too."""
        call = self._calls.get(chunk.sequence.sequence_id)
        if call is None or call.transfer_id is None or chunk.sequence.sequence_id in output.failed:
            return []  # ended while the step ran, without a reader, or not computed
        num_computed = chunk.start + chunk.num_tokens
        block_size = self.core.scheduler.block_size
        num_ready = -(-num_computed // block_size) if chunk.samples else num_computed // block_size
        sampled = output.sampled[chunk.sequence.sequence_id][-1:] if chunk.samples else ()
        token_ids = tuple(token.token_id for token in sampled)
        blocks = enumerate(chunk.sequence.block_table[:num_ready])
        offered = self.transfers.owner.add_ready(call.transfer_id, blocks, chunk.samples, token_ids, now)
        return self._apply_results(offered, now)

    def _end(self, request_id: str, error: TandemError, now: float) -> list[PrefillAction]:
        """End an open call without a token, and abort its offer."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return []
        self.core.scheduler.abort(request_id)
        ended = self.prefixes.cancel(request_id, AbortReason.CANCELLED, now)
        self.core.forget_request(request_id)
        if call.transfer_id is not None:
            ended += self.transfers.owner.abort(call.transfer_id, AbortReason.PREFILL_FAILED)
        return [*self._apply_results(ended, now), PrefillFailed(request_id, error)]

    # ---- deadlocks of prompts and readers

    def _unblock(self, now: float) -> list[PrefillAction]:
        """Withdraw one offer, or give up a read, after each stall: a reader may hold blocks for a prompt, and no step
        can run.

        The router retries the requests of withdrawn offers.
        """
        if self.core.scheduler.num_steps_in_flight or not any(
            self.transfers.is_wanted(call.transfer_id) for call in self._queued() if call.transfer_id is not None
        ):
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now >= self._stalled_since + MAX_STALL_S:
            self._stalled_since = now
            if given_up := self.prefixes.give_up_last(now):
                return [*self._apply_results(given_up, now), *self.core.next_step(now)]
            withdrawn = self._least_useful_offer()
            if withdrawn is not None:
                aborted = self.transfers.owner.abort(withdrawn, AbortReason.OVERLOADED)
                return [*self._apply_results(aborted, now), *self.core.next_step(now)]
        return []

    def _queued(self) -> list[_OpenCall]:
        """The calls with a prompt in the scheduler. The others lack no block: they wait for their prefix."""
        waiting = {sequence.sequence_id for sequence in self.prefixes.waiting}
        return [call for request_id, call in self._calls.items() if request_id not in waiting]

    def _least_useful_offer(self) -> TransferId | None:
        """The newest offer without a WANT; else the newest one whose reader lacks blocks; else the unfinished offer of
        lowest rank. Never the unfinished prompt of highest rank, if its reader has sent a WANT."""
        by_rank = sorted(self._queued(), key=lambda call: call.sequence.rank)
        first = by_rank[0].transfer_id if by_rank else None
        starved = [
            offer for offer in self.transfers.starved_offers() if offer != first or not self.transfers.is_wanted(offer)
        ]
        if starved:
            return starved[-1]
        offers = [call.transfer_id for call in by_rank[1:] if call.transfer_id is not None]
        unfinished = [offer for offer in offers if self.transfers.num_leased(offer)]
        return unfinished[-1] if unfinished else None

    def _apply_results(self, actions: Iterable[PrefixAction], now: float) -> list[PrefillAction]:
        """Act on the ends of prefix pulls, and keep the agent's actions. The end of an offer needs no action: its
        blocks are free."""
        mine: list[PrefillAction] = []
        for action in actions:
            if isinstance(action, PullResult):
                self.prefixes.end(action, now)
            elif not isinstance(action, TransferResult):
                mine.append(action)
        return mine

    def check(self) -> None:
        """Every open call has its sequence in the scheduler, or waits for its prefix."""
        self.core.check()
        self.transfers.check()
        check_claims(self.claims(), self.core.pool)
        assert self.core.open_calls.timelines.keys() == self._calls.keys()
        for request_id, call in self._calls.items():
            assert self.core.scheduler.get(request_id) is call.sequence or call.sequence in self.prefixes.waiting
        self.prefixes.check()
        assert self.prefixes.num_targets == self.core.pool.ledger()[Column.INCOMING]
