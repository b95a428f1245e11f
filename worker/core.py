"""The common part of the prefill and decode machines: steps, deadlines, and the load of the worker.

The machine of each role owns a `WorkerCore` and adds its own rules. `next_step` returns a step, and the shell answers
with `StepFinished` or `StepFailed`. At most two steps are in flight:

    step k      |---------------- runs ----------------|
    step k + 1                        planned |=====>  |------ runs ------|
                                              plan_at = started + expected duration - PLAN_AHEAD_S

So the model never waits for the event loop, and a sequence that arrives before `plan_at` is in step k + 1. If step k is
shorter than PLAN_AHEAD_S, step k + 1 is planned at once. The expected duration comes from earlier steps of similar
size. If the duration of step k is unknown, or step k + 1 needs a preemption, step k + 1 is planned at the end of step
k. If step k fails, step k + 1 fails, too. If one sequence of step k fails alone, the other sequences keep both steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from core.config import SchedulerConfig, WorkerConfig
from core.cost.step_cost import StepWork, work_of
from core.cost.step_cost_fit import StepCostFit
from core.errors import InvalidRequest, TandemError
from core.handoff import OwnerState
from core.lifecycle import Stage, Timeline, WorkerState
from core.request import Request
from core.scheduling.block_pool import BlockPool
from core.scheduling.ledger import Claim, SequenceState
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Rank, Sequence
from core.scheduling.worker_load import NO_CALL, CallId, WorkerLoad
from core.step import StepOutput, StepPlan, TokenEvent
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.peers import Drop
from worker.block_meter import BlockMeter
from worker.call_record import CallRecord
from worker.open_calls import OpenCalls
from worker.reported_load import ReportedCost, backlog_of, decode_contexts
from worker.step_stats import StepStats
from worker.tier.disk_tier import DiskTier

PLAN_AHEAD_S = 0.010  # for planning, the batch, and an event loop that is busy with the tokens of hundreds of sequences

TIMER_EARLY_S = 0.001  # uvloop counts whole milliseconds, so a timer may be early

# ---- events and actions of every worker


@dataclass(frozen=True, slots=True)
class StepFinished:
    output: StepOutput


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The runner raised an exception, and the step in flight has no output."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """Live options have changed. A step in flight ends as it was planned."""

    scheduler: SchedulerConfig  # with the sizes for the device, unless vLLM plans the steps
    worker: WorkerConfig


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse new calls from now on."""


class Planned(Enum):
    """When a step was planned."""

    AHEAD = "ahead"  # while the step before is in flight
    AT_END = "at_end"  # at the end of the step before: the model waits for this step
    IDLE = "idle"  # after a time without work


@dataclass(frozen=True, slots=True)
class RunStep:
    plan: StepPlan
    planned: Planned


@dataclass(slots=True)
class StepTimes:
    """The expected duration of a step, by its rough number of tokens.

    A shorter step changes the expectation at once, a longer one by a quarter: a step that is planned a little early
    costs less than a model that waits.
    """

    _expected_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def record(self, num_tokens: int, duration_s: float) -> None:
        size = _rough_size(num_tokens)
        known = self._expected_s.get(size, duration_s)
        self._expected_s[size] = duration_s if duration_s < known else known + (duration_s - known) / 4

    def expected_s(self, num_tokens: int) -> float | None:
        return self._expected_s.get(_rough_size(num_tokens))


def _num_tokens(work: StepWork) -> int:
    return work.num_decodes + work.prefill_tokens


def _rough_size(num_tokens: int) -> tuple[int, int]:
    """The three leading bits, and the number of bits behind them."""
    num_behind = max(num_tokens.bit_length() - 3, 0)
    return num_tokens >> num_behind, num_behind


@dataclass(slots=True)
class WorkerCore:
    scheduler: Scheduler
    pool: BlockPool
    plans_ahead: bool = True
    costs: StepCostFit = field(default_factory=StepCostFit)  # learns from every step
    stats: StepStats = field(default_factory=StepStats)
    held_blocks: BlockMeter = field(default_factory=BlockMeter)
    tier: DiskTier | None = None  # below the pool
    draining: bool = False
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    num_arrived: int = 0
    num_sampled_tokens: int = 0
    step_started_at: float = 0.0  # of the oldest step in flight
    _step_works: list[StepWork] = field(default_factory=list)  # of the steps in flight, oldest first
    _step_times: StepTimes = field(default_factory=StepTimes)
    _plan_at: float | None = None  # when to plan the next step while one is in flight; None: at its end
    _tried_to_plan: bool = False  # since `_plan_at`
    _step_ended: bool = False  # by the event that is being handled
    _prefilling: dict[str, Timeline] = field(default_factory=dict)  # the timelines in stage PREFILL
    _num_preemptions: int = 0  # that `held_blocks` knows of
    _reported_cost: ReportedCost = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler.step_cost = self.costs.cost
        self._reported_cost = ReportedCost(self.costs.cost)

    def admit(
        self, request: Request, deadline: float, now: float, sample_limit: int | None = None, call: CallId = NO_CALL
    ) -> Sequence:
        """A new sequence with its deadline and timeline. The caller adds the sequence to the scheduler.

        Raises `InvalidRequest` if the worker has a sequence with this id, or if the request names an adapter.
        """
        if request.adapter:
            raise InvalidRequest("model", "the engine of this worker has no adapters; workers with `--engine vllm` do")
        # A sequence that is aborted during a step stays in the scheduler until the step ends.
        if request.request_id in self.open_calls.timelines or self.scheduler.get(request.request_id) is not None:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        self.num_arrived += 1
        record = CallRecord(len(self.scheduler.waiting), self.scheduler.num_waiting_tokens)
        self.open_calls.open(request.request_id, call, deadline, record, now)
        return Sequence(request, self.num_arrived, sample_limit, arrived_at=now)

    def forget_request(self, request_id: str) -> None:
        """Remove the deadline, the timeline and the call of a sequence that has ended."""
        self.open_calls.close(request_id)
        self._prefilling.pop(request_id, None)
        self.held_blocks.forget(request_id)

    def undo_admit(self, sequence: Sequence) -> None:
        """Undo `admit`, and `scheduler.add` if that succeeded."""
        self.scheduler.abort(sequence.sequence_id)
        self.forget_request(sequence.sequence_id)

    def next_step(self, now: float, admit_before: Rank | None = None) -> list[RunStep]:
        """Start a step if there is something to compute, and if it is time for one. `admit_before`: see the scheduler.

        Call this after every event.
        """
        steps: list[RunStep] = []
        step_ended, self._step_ended = self._step_ended, False
        if not self.scheduler.num_steps_in_flight:
            steps += self._plan(Planned.AT_END if step_ended else Planned.IDLE, now, admit_before)
        is_time = self._plan_at is not None and now >= self._plan_at - TIMER_EARLY_S
        if self.scheduler.num_steps_in_flight == 1 and is_time:
            self._tried_to_plan = True
            steps += self._plan(Planned.AHEAD, now, admit_before)
        return steps

    def next_deadline(self) -> float | None:
        """Of a request, or for planning ahead."""
        deadline = self.open_calls.deadlines.next()
        if self._plan_at is None or self._tried_to_plan or self.scheduler.num_steps_in_flight != 1:
            return deadline
        return self._plan_at if deadline is None else min(deadline, self._plan_at)

    def complete_step(self, output: StepOutput, now: float) -> list[TokenEvent]:
        """Take the output of the oldest step. Returns one event for each sampled token of a sequence that goes on.

        The caller ends the calls in `output.failed`.
        """
        plan = self.scheduler.oldest_step
        assert plan is not None, "no step is in flight"
        self.open_calls.counts.record(len(plan.chunks))
        events = self.scheduler.complete_step(output)
        work = self._step_works.pop(0)
        if not output.failed:  # a step that runs short of memory is computed in several parts
            # If the event loop was blocked for two steps, only the engine's own time is right.
            seconds = now - self.step_started_at if output.seconds is None else output.seconds
            if plan.num_drafts:
                self.scheduler.record_drafts(plan, work, seconds)
                self.stats.record(work, seconds)
            else:
                self.record_step(work, seconds)
        self._on_step_ended(now)
        self.num_sampled_tokens += len(events)
        for request_id in [name for name in self._prefilling if name in output.sampled]:
            del self._prefilling[request_id]
            self.open_calls.enter(request_id, Stage.DECODE, now)
        return events

    def record_step(self, work: StepWork, seconds: float) -> None:
        """Learn from the duration of a step."""
        self._step_times.record(_num_tokens(work), seconds)
        self.costs.record(work, seconds)
        self.stats.record(work, seconds)
        self.scheduler.step_cost = self.costs.cost

    def fail_step(self, now: float) -> list[Sequence]:
        """Returns the sequences of the failed step. The caller ends their calls."""
        failed = self.scheduler.fail_step()
        self._step_works.clear()
        self._on_step_ended(now)
        return failed

    def _plan(self, planned: Planned, now: float, admit_before: Rank | None) -> list[RunStep]:
        plan = self.scheduler.schedule(admit_before)
        if self._num_preemptions != self.scheduler.num_preemptions:
            self._num_preemptions = self.scheduler.num_preemptions
            self.held_blocks.note_waiting(self.scheduler.waiting, now)
        if plan is None:
            return []
        self.held_blocks.note_planned(plan.chunks, now)
        for sequence in self.scheduler.take_admitted():
            timeline = self.open_calls.timelines[sequence.sequence_id]
            if timeline.stage is Stage.QUEUE:
                self.open_calls.enter(sequence.sequence_id, Stage.PREFILL, now)
                self._prefilling[sequence.sequence_id] = timeline
        self._step_works.append(work := work_of(plan.chunks))
        self.stats.num_sequences, self.stats.num_tokens = len(plan.chunks), _num_tokens(work)
        if planned is not Planned.AHEAD:
            self._on_step_started(now)
        return [RunStep(plan, planned)]

    def _on_step_started(self, now: float) -> None:
        """The oldest step in flight starts."""
        self.step_started_at = now
        expected_s = self._step_times.expected_s(_num_tokens(self._step_works[0])) if self.plans_ahead else None
        self._plan_at = None if expected_s is None else now + expected_s - PLAN_AHEAD_S
        self._tried_to_plan = False

    def _on_step_ended(self, now: float) -> None:
        """The oldest step has left the scheduler. A step that was planned ahead starts now."""
        self._step_ended = True
        if self._step_works:
            self._on_step_started(now)

    def num_spare_blocks(self, num_promised_blocks: int = 0, before: Rank | None = None) -> int:
        """Available blocks that no running sequence, half-computed prompt or hand-off needs, nor the next prompt.

        Negative if these lack blocks. `before`: prompts count if they rank higher.
        """
        queues = self.scheduler.queues
        prompts = dict(queues.prefilling)
        if (first := queues.prompts.first()) is not None:
            prompts[first.sequence_id] = first
        needed = self._num_to_take(each for each in prompts.values() if before is None or each.rank < before)
        needed += len(self.scheduler.running) + len(queues.waiting_with_blocks) + num_promised_blocks
        return self.pool.num_available - needed

    def num_prompt_blocks(self) -> int:
        """Blocks that the prompts of the scheduler have yet to take."""
        return self._num_to_take([*self.scheduler.queues.prefilling.values(), *self.scheduler.waiting])

    def _num_to_take(self, prompts: Iterable[Sequence]) -> int:
        block_size = self.scheduler.block_size
        return sum(-(-each.num_tokens // block_size) - len(each.block_table) for each in prompts)

    def unbegun(self) -> list[Sequence]:
        """Waiting sequences of which nothing is computed or held here: another worker loses nothing with them."""
        return [s for s in self.scheduler.waiting if not (s.block_table or s.num_lost_tokens)]

    def load(
        self,
        transfers: TransferMachine,
        num_pulls_waiting: int = 0,
        num_promised_blocks: int = 0,
        *,
        prompts_left: Iterable[tuple[int, int]] = (),
        takes_moves: bool = False,
    ) -> WorkerLoad:
        """`prompts_left`: of sequences that have yet to join the scheduler."""
        counters, stats = transfers.counters, self.stats
        step_cost = self._reported_cost.update(self.costs.cost)
        contexts = decode_contexts(self.scheduler.running)
        joining = list(prompts_left)
        return WorkerLoad(
            state=WorkerState.DRAINING if self.draining else WorkerState.SERVING,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(joining),
            num_calls=len(self.open_calls),
            router_calls=dict(self.open_calls.router_calls),
            num_pulls_waiting=num_pulls_waiting,
            num_queued_tokens=self.scheduler.num_waiting_tokens + sum(num_tokens for num_tokens, _ in joining),
            ledger=self.pool.ledger(),
            num_prefilled_tokens=self.scheduler.num_prefilled_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_transfers=transfers.num_alive,
            transfers=transfers.num_by_state(),
            transferred_bytes=counters.num_bytes_read,
            transfer_seconds=counters.read_seconds,
            num_expired_leases=counters.offers[OwnerState.EXPIRED.value],
            num_dropped_messages=counters.dropped.total() - counters.dropped[Drop.UNSENT],
            num_corrupt_blocks=counters.num_digest_mismatches,
            step_cost=step_cost,
            max_step_tokens=self.scheduler.config.max_batched_tokens,
            step_limit_s=self.scheduler.step_limit_s,
            num_decoding=len(contexts),
            decode_context=sum(contexts),
            prompt_backlog=backlog_of(self.scheduler.prompts_left() + joining, step_cost),
            num_promised_blocks=num_promised_blocks,
            num_released_blocks=self.scheduler.num_released_blocks,
            batch_sequences=stats.num_sequences,
            batch_tokens=stats.num_tokens,
            busy_seconds=stats.seconds,
            decode_steps=stats.decode_steps,
            decode_step_seconds=stats.decode_seconds,
            flop=stats.flop,
            memory_bytes=stats.memory_bytes,
            flop_use=stats.flop_use,
            bandwidth_use=stats.bandwidth_use,
            slo_itl_s=self.scheduler.config.slo_itl_ms / 1e3,
            num_drafts=self.scheduler.num_drafts,
            num_right_drafts=self.scheduler.num_right_drafts,
            takes_moves=takes_moves,
            gives_prefixes=True,
            **({} if self.tier is None else self.tier.load()),
        )

    def take_role(self, *, speculates: bool) -> None:
        """Serve again after a drain, with the machine of another role. `speculates` as in `Scheduler`."""
        assert not self.open_calls, "the drain has not ended"
        assert not self.scheduler.num_steps_in_flight, "a step of the other role is in flight"
        self.draining = False
        self.scheduler.speculates = speculates

    def claims(self) -> list[Claim]:
        """The claims of the scheduler's sequences that have blocks, and of the tier below the pool."""
        states = [(sequence, SequenceState.WAITING) for sequence in self.scheduler.waiting]
        states += [(sequence, SequenceState.RUNNING) for sequence in self.scheduler.running]
        states += [(sequence, SequenceState.ENDING) for sequence in self.scheduler.queues.ending.values()]
        claims = [claim_of(sequence, state) for sequence, state in states if sequence.block_table]
        return claims if self.tier is None else claims + self.tier.claims()

    def check(self) -> None:
        self.pool.check()
        self.scheduler.check()
        self.open_calls.check()
        if self.tier is not None:
            self.tier.check()
        assert len(self.held_blocks) <= len(self.open_calls)
        timelines = self.open_calls.timelines
        in_prefill = {name for name, timeline in timelines.items() if timeline.stage is Stage.PREFILL}
        assert self._prefilling.keys() == in_prefill


def claim_of(sequence: Sequence, state: SequenceState) -> Claim:
    return Claim(sequence.sequence_id, state, tuple(sequence.block_table), sequence.arrived_at)
