"""A worker in a replay: the production machine of its role, with a cost model in place of a model and of KV bytes.

    calls, notifications, finished steps --post--> machine --actions--> agent, step, answers

Unlike `simulator/node.py`, no fault happens, the KV has no content, and any number of routers call the worker and hear
its reports. Reports follow worker/reports.py: at once after a change, then at most one per `report_interval_s`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from core.config import SchedulerConfig, TransferConfig, WorkerConfig
from core.cost.step_cost import StepCost, work_of
from core.cost.step_cost_fit import StepCostFit
from core.errors import TandemError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole, Stage
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.worker_load import WorkerChanges
from core.step import SampledToken, StepOutput, StepPlan, TokenEvent
from decode_worker.machine import DecodeArrived, DecodeCancelled, DecodeDone, DecodeFailed, DecodeMachine, EmitTokens
from kv_transfer.protocol.events import AgentAction, StartRead
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import PrefillArrived, PrefillCancelled, PrefillDone, PrefillFailed, PrefillMachine
from router.requests import events
from simulator.agent import SimulatedAgent
from simulator.cost_model import LinkCost
from simulator.machine_timer import MachineTimer
from simulator.memory import Memory
from simulator.stream import Stream
from simulator.world import SimulationError, World
from worker.core import RunStep, StepFinished, WorkerCore
from worker.view import WorkerMachineView

OUTPUT_TOKEN = SampledToken(2**32 - 1)  # in no prompt of a trace


class BlankMemory(Memory):
    """Blocks without content."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class ReplayAgent(SimulatedAgent):
    """A simulated agent whose reads take the time of a link, and copy nothing. Digests are off.

    A read waits for earlier reads of its two agents.
    """

    link: LinkCost
    block_bytes: int
    busy_until = 0.0

    def read_seconds(self, read: StartRead) -> float:
        owner = self._directory[read.peer]
        assert isinstance(owner, ReplayAgent)
        begins_at = max(self._world.now, self.busy_until, owner.busy_until)
        ends_at = begins_at + len(read.targets) * self.block_bytes / self.link.bytes_per_s
        self.busy_until = owner.busy_until = ends_at
        return ends_at - self._world.now + self.link.latency_s

    def _copy(self, read: StartRead, first: int, end: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ReplayWorkerSpec:
    worker_id: str
    role: ServiceRole
    num_blocks: int
    layout: KVLayout
    scheduler: SchedulerConfig
    transfer: TransferConfig
    worker: WorkerConfig
    step_cost: StepCost
    step_noise: float  # standard deviation of the logarithm of a step's time
    link: LinkCost


@dataclass(slots=True)
class _OpenCall:
    caller: Stream  # of events to the router
    number: int
    num_tokens: int = 0  # sent


class ReplayWorker:
    def __init__(self, world: World, spec: ReplayWorkerSpec) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self._world = world
        self.pool = BlockPool(spec.num_blocks)
        name = f"{spec.worker_id}@0001"
        self.agent = ReplayAgent(name, self.pool, BlankMemory(spec.layout.block_size), spec.transfer, self.post)
        self.agent.link, self.agent.block_bytes = spec.link, spec.layout.block_bytes
        self.address = AgentAddress(name, 1, b"", 0, spec.num_blocks, spec.layout, spec.transfer.lease_s)
        self.machine = self._build_machine()
        self.view = WorkerMachineView(self.machine)
        self.busy_s = 0.0  # time in steps
        self._steps: deque[StepPlan] = deque()  # submitted; the first one is being computed
        self._calls: dict[str, _OpenCall] = {}  # by id
        self._timer = MachineTimer(world, self.machine, self.post)
        self._used_sum, self._num_samples = 0.0, 0
        self._noise = random.Random(f"steps of {spec.worker_id}, {world.seed}")
        self._subscribers: list[Stream] = []
        self._changed = False
        self._next_report_at = 0.0
        world.after(spec.worker.idle_report_interval_s, self._report_idle)

    def _build_machine(self) -> PrefillMachine | DecodeMachine:
        spec = self.spec
        scheduler = Scheduler(spec.scheduler, self.pool, spec.layout.block_size, frozenset())
        core = WorkerCore(scheduler, self.pool, costs=StepCostFit(spec.step_cost))  # as after the warm-up of an engine
        transfers = TransferMachine(spec.transfer, self.pool, self.address)
        if spec.role is ServiceRole.PREFILL:
            return PrefillMachine(core, transfers)
        return DecodeMachine(core, transfers, spec.worker.max_pulls_waiting)

    # ---- the driver

    def post(self, event: Any) -> None:
        for action in self.machine.handle(event, self._world.now):
            self._perform(action)
        self._mark_changed()
        self._timer.update()

    # ---- acting

    def _perform(self, action: Any) -> None:
        match action:
            case RunStep(plan=plan):
                self._steps.append(plan)
                if len(self._steps) == 1:
                    self._start_step(plan)
            case EmitTokens(tokens):
                self._emit(tokens)
            case PrefillDone(request_id=call_id):
                self._end_call(call_id, _prefill_result(action))
            case DecodeDone(request_id=call_id):
                call = self._calls.get(call_id)
                self._end_call(call_id, _decode_result(action, 0 if call is None else call.num_tokens))
            case PrefillFailed(call_id, error) | DecodeFailed(call_id, error):
                self._end_call(call_id, error)
            case _:
                if not isinstance(action, AgentAction):
                    raise SimulationError(f"no code performs {action}")
                self.agent.perform(action)

    # ---- steps

    def _start_step(self, plan: StepPlan) -> None:
        noise = self._noise.lognormvariate(0.0, self.spec.step_noise) if self.spec.step_noise else 1.0
        seconds = self.spec.step_cost.seconds(work_of(plan)) * noise
        self.busy_s += seconds
        self._world.after(seconds, self._end_step)

    def _end_step(self) -> None:
        """The next submitted step begins before the machine takes the output."""
        plan = self._steps.popleft()
        if self._steps:
            self._start_step(self._steps[0])
        sampled = {chunk.sequence.sequence_id: OUTPUT_TOKEN for chunk in plan.chunks if chunk.samples}
        self.post(StepFinished(StepOutput(plan.step_id, sampled)))

    # ---- calls

    def accept(self, arrived: PrefillArrived | DecodeArrived, caller: Stream) -> None:
        """Start a call. `caller` takes its tokens and its end."""
        call_id = arrived.request.request_id
        self._calls[call_id] = _OpenCall(caller, arrived.call.number)
        try:
            self.post(arrived)
        except TandemError as error:
            self._end_call(call_id, error)

    def cancel(self, call_id: str) -> None:
        if self._calls.pop(call_id, None) is not None:
            is_prefill = self.spec.role is ServiceRole.PREFILL
            self.post(PrefillCancelled(call_id) if is_prefill else DecodeCancelled(call_id))

    def _emit(self, tokens: tuple[TokenEvent, ...]) -> None:
        """One message for each router."""
        rows: dict[Stream, tuple[list[int], list[int]]] = {}
        for event in tokens:
            call = self._calls.get(event.sequence_id)
            if call is not None:
                call.num_tokens += 1
                numbers, indexes = rows.setdefault(call.caller, ([], []))
                numbers.append(call.number)
                indexes.append(event.index)
        for caller, (numbers, indexes) in rows.items():
            caller.send(events.StepTokens(numbers, indexes, (OUTPUT_TOKEN.token_id,) * len(numbers), logprobs={}))

    def _end_call(self, call_id: str, result: Any) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            is_prefill = self.spec.role is ServiceRole.PREFILL
            call.caller.send((events.PrefillReturned if is_prefill else events.DecodeReturned)(call_id, result))

    # ---- use of the pool

    def sample_pool(self) -> None:
        ledger = self.pool.ledger()
        self._used_sum += 1.0 - (ledger[Column.FREE] + ledger[Column.CACHED]) / self.pool.num_blocks
        self._num_samples += 1

    @property
    def mean_used(self) -> float:
        """Mean share of blocks with a holder or a reader, over the samples."""
        return self._used_sum / max(1, self._num_samples)

    # ---- reports

    def subscribe(self, subscriber: Stream) -> None:
        """Send the snapshot now, and every report from now on."""
        self._publish()
        view = self.view
        subscriber.send(
            events.WorkerJoined(self.worker_id, self.spec.role, self.address, view.cached_blocks, view.load, view.paths)
        )
        self._subscribers.append(subscriber)

    def _mark_changed(self) -> None:
        if not self._changed:
            self._changed = True
            self._world.at(self._next_report_at, self._report_change)

    def _report_change(self) -> None:
        if self._changed:
            self._publish()

    def _report_idle(self) -> None:
        if self._world.now >= self._next_report_at:
            self._publish(unchanged=True)
        self._world.after(self.spec.worker.idle_report_interval_s, self._report_idle)

    def _publish(self, *, unchanged: bool = False) -> None:
        """Send what has changed; without changes, an empty report if `unchanged`."""
        self._changed = False
        self._next_report_at = self._world.now + self.spec.worker.report_interval_s
        changes = self.view.take_changes(self.view.load)
        if changes is not None or unchanged:
            report = events.WorkerReported(self.worker_id, changes or WorkerChanges())
            for subscriber in self._subscribers:
                subscriber.send(report)


def _prefill_result(done: PrefillDone) -> events.PrefillResult:
    timeline = done.timeline
    return events.PrefillResult(
        done.index, done.token, done.finish_reason, done.cached_tokens,
        timeline.seconds_in(Stage.QUEUE), timeline.seconds_in(Stage.PREFILL), kv_block_seconds=done.kv_block_seconds,
    )  # fmt: skip


def _decode_result(done: DecodeDone, num_tokens: int) -> events.DecodeResult:
    timeline = done.timeline
    return events.DecodeResult(
        finish_reason=done.finish_reason,
        num_tokens=num_tokens,
        cached_tokens=done.cached_tokens,
        queue_s=timeline.seconds_in(Stage.QUEUE),
        prefill_s=timeline.seconds_in(Stage.PREFILL),
        transfer_s=timeline.seconds_in(Stage.TRANSFER),
        transfer_exposed_s=0.0 if done.pull is None else done.pull.exposed_s,
        transferred_bytes=0 if done.pull is None else done.pull.num_bytes,
        kv_block_seconds=done.kv_block_seconds,
    )
