"""The common part of the prefill and decode machines: steps, deadlines, and the load of the worker.

The machine of each role owns a `WorkerCore` and adds its own rules. One step is in flight at a time: `next_step`
returns the step, and the shell answers with `StepFinished` or `StepFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.block_pool import BlockPool
from core.deadlines import Deadlines
from core.errors import InvalidRequest, TandemError
from core.handoff import OwnerState
from core.ledger import Claim, SequenceState
from core.lifecycle import Stage, Timeline, WorkerState
from core.request import Request
from core.scheduler import Scheduler
from core.sequence import Rank, Sequence
from core.step import StepOutput, StepPlan, TokenEvent
from core.worker_load import NO_CALL, CallId, RouterCalls, WorkerLoad
from kv_transfer.machine import TransferMachine
from kv_transfer.peers import Drop

# ---- events and actions of every worker


@dataclass(frozen=True, slots=True)
class StepFinished:
    output: StepOutput


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The runner raised an exception, and the step in flight has no output."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse new calls from now on."""


@dataclass(frozen=True, slots=True)
class RunStep:
    plan: StepPlan


@dataclass(slots=True)
class WorkerCore:
    scheduler: Scheduler
    pool: BlockPool
    draining: bool = False
    deadlines: Deadlines[str] = field(default_factory=Deadlines)  # by request id
    timelines: dict[str, Timeline] = field(default_factory=dict)  # by request id
    calls: dict[str, CallId] = field(default_factory=dict)  # by request id
    router_calls: dict[str, RouterCalls] = field(default_factory=dict)  # by router id; only routers with open calls
    num_arrived: int = 0
    num_prefilled_tokens: int = 0
    num_sampled_tokens: int = 0

    def admit(
        self, request: Request, deadline: float, now: float, sample_limit: int | None = None, call: CallId = NO_CALL
    ) -> Sequence:
        """A new sequence with its deadline and timeline. The caller adds the sequence to the scheduler.

        Raises `InvalidRequest` if the worker has a sequence with this id.
        """
        # A sequence that is aborted during a step stays in the scheduler until the step ends.
        if request.request_id in self.timelines or self.scheduler.get(request.request_id) is not None:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        self.num_arrived += 1
        self.timelines[request.request_id] = Timeline(Stage.QUEUE, now)
        self.deadlines.set(request.request_id, deadline)
        self._note_call(request.request_id, call)
        return Sequence(request, self.num_arrived, sample_limit, arrived_at=now)

    def dismiss(self, request_id: str) -> None:
        """Remove the deadline, the timeline and the call of a sequence that has ended."""
        self.timelines.pop(request_id, None)
        self.deadlines.cancel(request_id)
        call = self.calls.pop(request_id, None)
        if call is not None:
            last_call, num_open = self.router_calls.pop(call.router_id)
            if num_open > 1:
                self.router_calls[call.router_id] = RouterCalls(last_call, num_open - 1)

    def _note_call(self, request_id: str, call: CallId) -> None:
        last_call, num_open = self.router_calls.get(call.router_id, RouterCalls())
        self.calls[request_id] = call
        self.router_calls[call.router_id] = RouterCalls(max(last_call, call.number), num_open + 1)

    def undo_admit(self, sequence: Sequence) -> None:
        """Undo `admit`, and `scheduler.add` if that succeeded."""
        self.scheduler.abort(sequence.sequence_id)
        self.dismiss(sequence.sequence_id)

    def next_step(self, now: float, admit_before: Rank | None = None) -> list[RunStep]:
        """Start a step, unless one is in flight or there is nothing to compute. `admit_before`: see the scheduler."""
        if self.scheduler.step_in_flight is not None:
            return []
        plan = self.scheduler.schedule(admit_before)
        if plan is None:
            return []
        for chunk in plan.chunks:
            timeline = self.timelines[chunk.sequence_id]
            if timeline.stage is Stage.QUEUE:
                timeline.enter(Stage.PREFILL, now)
        return [RunStep(plan)]

    def complete_step(self, output: StepOutput, now: float) -> list[TokenEvent]:
        """Take the output of the step. Returns one event for each sampled token, with its sequence in stage DECODE."""
        assert self.scheduler.step_in_flight is not None
        self.num_prefilled_tokens += sum(c.num_tokens for c in self.scheduler.step_in_flight.chunks if c.num_tokens > 1)
        events = self.scheduler.complete_step(output)
        self.num_sampled_tokens += len(events)
        for event in events:
            timeline = self.timelines[event.sequence_id]
            if timeline.stage is Stage.PREFILL:
                timeline.enter(Stage.DECODE, now)
        return events

    def load(self, transfers: TransferMachine, num_pulls_waiting: int = 0) -> WorkerLoad:
        counters = transfers.counters
        return WorkerLoad(
            state=WorkerState.DRAINING if self.draining else WorkerState.SERVING,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_calls=len(self.calls),
            router_calls=dict(self.router_calls),
            num_pulls_waiting=num_pulls_waiting,
            num_queued_tokens=self.scheduler.num_waiting_tokens,
            ledger=self.pool.ledger(),
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_transfers=transfers.num_alive,
            transfers=transfers.num_by_state(),
            transferred_bytes=counters.num_bytes_read,
            transfer_seconds=counters.read_seconds,
            num_expired_leases=counters.offers[OwnerState.EXPIRED.value],
            num_dropped_messages=counters.dropped.total() - counters.dropped[Drop.UNSENT],
            num_corrupt_blocks=counters.num_digest_mismatches,
        )

    def claims(self) -> list[Claim]:
        """The claims of the scheduler's sequences that have blocks."""
        states = [(sequence, SequenceState.WAITING) for sequence in self.scheduler.waiting]
        states += [(sequence, SequenceState.RUNNING) for sequence in self.scheduler.running]
        return [
            claim_of(sequence, SequenceState.ENDING if sequence.finish_reason is not None else state)
            for sequence, state in states
            if sequence.block_table
        ]

    def check(self) -> None:
        self.pool.check()
        self.scheduler.check()
        assert len(self.deadlines) == len(self.timelines)
        assert self.calls.keys() == self.timelines.keys()
        assert len(self.calls) == sum(calls.num_open for calls in self.router_calls.values())


def claim_of(sequence: Sequence, state: SequenceState) -> Claim:
    return Claim(sequence.sequence_id, state, tuple(sequence.block_table), sequence.arrived_at)
