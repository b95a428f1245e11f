"""A simulated worker process: it drives the production machine of its role in virtual time.

    calls, notifications, finished steps --post--> machine --actions--> agent, step, answers of calls

The clock of the process has an offset to the clock of the world. The process may be stopped for a while; its events
wait in an inbox. The process may die: its calls break at once, or (silent death) its peers receive nothing any more.
The machine checks itself after every event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.config import SchedulerConfig, TransferConfig
from core.errors import OutOfDeviceMemory, TandemError, TokenStreamEnded
from core.handoff import AgentAddress, Location
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole, Stage
from core.machine import Tick
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.worker_load import WorkerChanges
from core.step import StepOutput, StepPlan, TokenEvent
from decode_worker.machine import DecodeArrived, DecodeCancelled, DecodeDone, DecodeFailed, DecodeMachine, EmitTokens
from decode_worker.pull_queue import PullQueue
from kv_transfer.protocol.events import AgentAction
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import PrefillArrived, PrefillCancelled, PrefillDone, PrefillFailed, PrefillMachine
from router.requests import events
from simulator.agent import MEMORY_BYTES_PER_S, SimulatedAgent
from simulator.machine_timer import MachineTimer
from simulator.memory import EOS_TOKEN_IDS, Memory
from simulator.network import Call, CallState, Network
from simulator.world import SimulationError, World
from worker.core import DrainRequested, Planned, RunStep, StepFailed, StepFinished, WorkerCore
from worker.view import WorkerMachineView

MAX_PULLS_WAITING = 32
PROBE_BYTES = 1 << 20

SendTokens = Callable[["WorkerNode", events.StepTokens], None]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    worker_id: str
    role: ServiceRole
    num_blocks: int
    layout: KVLayout
    scheduler: SchedulerConfig
    transfer: TransferConfig
    step_s: float = 0.004
    token_s: float = 0.0002
    step_failure: float = 0.0  # probability
    memory_failure: float = 0.0  # probability that a step has no memory for one of its sequences
    report_interval_s: float = 0.1
    idle_report_interval_s: float = 0.4


class WorkerNode:
    """One incarnation of one worker. `answer` sends the results of an open call to the router."""

    def __init__(self, world: World, network: Network, spec: WorkerSpec, incarnation: int) -> None:
        self.spec = spec
        self.alive = True
        self.silent = False  # died, and its connections did not break
        self.killed = False  # died, and its last answers may be lost
        self.calls: dict[str, Call] = {}  # open at this end
        self.answer: Callable[[WorkerNode, Call, Any], None] = _not_connected
        self.token_streams: dict[str, tuple[Call, SendTokens]] = {}  # open at this end, by call id
        self.subscriber: Callable[[Any], None] | None = None
        self._world, self._network = world, network
        self._offset = world.random.uniform(0.0, 1000.0)
        self._inbox: list[Any] | None = None  # while stopped
        self._changed = False
        self._steps: deque[StepPlan] = deque()  # in flight, oldest first
        self._step_failed = False  # the newest step failed or was dropped
        self.pool = BlockPool(spec.num_blocks)
        self.memory = Memory(spec.num_blocks, spec.layout.block_size, incarnation)
        name = f"{spec.worker_id}@{incarnation:04x}"
        self.agent = SimulatedAgent(name, self.pool, self.memory, spec.transfer, self.post)
        location = Location("one machine", memory_bytes_per_s=MEMORY_BYTES_PER_S)
        self.address = AgentAddress(
            name, incarnation, b"", 0, spec.num_blocks, spec.layout, spec.transfer.lease_s, PROBE_BYTES, location
        )
        self.machine = self._build_machine()
        self.view = WorkerMachineView(self.machine)
        self._timer = MachineTimer(world, self.machine, self._on_tick, self._offset)
        world.after(spec.report_interval_s, self._report_changes)
        world.after(spec.idle_report_interval_s, self._report_idle)

    def _build_machine(self) -> PrefillMachine | DecodeMachine:
        spec = self.spec
        scheduler = Scheduler(spec.scheduler, self.pool, spec.layout.block_size, EOS_TOKEN_IDS)
        core = WorkerCore(scheduler, self.pool)
        transfers = TransferMachine(spec.transfer, self.pool, self.address)
        if spec.role is ServiceRole.PREFILL:
            return PrefillMachine(core, transfers)
        return DecodeMachine(core, transfers, MAX_PULLS_WAITING)

    # ---- the driver

    @property
    def clock(self) -> float:
        return self._world.now + self._offset

    def post(self, event: Any) -> None:
        if not self.alive:
            return
        if self._inbox is not None:
            self._inbox.append(event)
            return
        actions = self.machine.handle(event, self.clock)
        if not isinstance(event, Tick):
            self._world.note(f"{self.agent.name} <- {describe(event)}")
        for action in actions:
            self._perform(action)
        self.machine.check()
        if isinstance(self.machine, DecodeMachine):
            self._count_pulls(self.machine.pulls)
        self._changed = True
        self._timer.update()

    def _count_pulls(self, pulls: PullQueue) -> None:
        """Count the events after which hand-offs compete for blocks."""
        half_pulled, is_blocked = pulls.num_half_pulled, pulls.blocked_rank is not None
        self._world.counts["half-pulled together"] += half_pulled > 1
        self._world.counts["half-pulled while another is blocked"] += bool(half_pulled and is_blocked)

    def _on_tick(self, tick: Tick) -> None:
        if self._inbox is None:
            self.post(tick)  # else `resume` sets the timer again

    # ---- acting

    def _perform(self, action: Any) -> None:
        if isinstance(action, AgentAction):
            self.agent.perform(action)
            return
        match action:
            case RunStep():
                self._run_step(action)
            case PrefillDone(request_id=call_id):
                timeline = action.timeline
                result = events.PrefillResult(
                    action.index, action.token, action.finish_reason, action.cached_tokens,
                    timeline.seconds_in(Stage.QUEUE), timeline.seconds_in(Stage.PREFILL),
                    kv_block_seconds=action.kv_block_seconds,
                )  # fmt: skip
                self._end_call(call_id, result)
            case DecodeDone(request_id=call_id):
                call = self.calls.get(call_id)
                self._end_call(call_id, _decode_result(action, 0 if call is None else call.num_tokens))
            case PrefillFailed(call_id, error) | DecodeFailed(call_id, error):
                self._end_call(call_id, error)
            case EmitTokens(tokens):
                self._emit(tokens)
            case _:
                raise SimulationError(f"no code performs {action}")

    def _run_step(self, step: RunStep) -> None:
        """Compute a step after the step in flight, as `StepExecutor` does."""
        self._world.counts[f"step planned {step.planned.value}"] += 1
        if step.planned is Planned.AHEAD and self._step_failed:
            self._world.counts["dropped step"] += 1
            return
        self._step_failed = False
        self._steps.append(step.plan)
        if len(self._steps) == 1:
            self._start_step()

    def _start_step(self) -> None:
        """Write the slots in the middle of the step, and return the result at its end."""
        world, plan = self._world, self._steps[0]
        duration = (self.spec.step_s + self.spec.token_s * plan.num_tokens) * world.random.uniform(0.7, 1.5)
        if world.chance(self.spec.step_failure):
            world.counts["failed step"] += 1
            world.marks.update(f"failed step of {chunk.sequence.sequence_id}" for chunk in plan.chunks)
            world.after(duration, self._fail_step)
        else:
            world.after(duration / 2, lambda: self._compute(plan, duration / 2))

    def _fail_step(self) -> None:
        """The oldest step fails, and takes the step that was planned ahead with it."""
        self._world.counts["dropped step"] += len(self._steps) - 1
        self._steps.clear()
        self._step_failed = True
        self.post(StepFailed(TandemError("the step failed")))

    def _compute(self, plan: StepPlan, remaining_s: float) -> None:
        if not self.alive:
            return
        self._check_writes(plan)
        output = self.memory.run(plan, self._without_memory(plan))
        self._world.after(remaining_s, lambda: self._end_step(output))

    def _without_memory(self, plan: StepPlan) -> dict[str, TandemError]:
        """The sequence of a step that the device has no memory for, if there is one."""
        world = self._world
        if not self.spec.memory_failure or not world.chance(self.spec.memory_failure):
            return {}
        sequence_id = world.random.choice(plan.chunks).sequence.sequence_id
        world.counts["sequence without memory"] += 1
        world.marks.add(f"sequence without memory of {sequence_id}")
        return {sequence_id: OutOfDeviceMemory(f"no memory for {sequence_id}")}

    def _end_step(self, output: StepOutput) -> None:
        self._steps.popleft()
        if self._steps:
            self._start_step()
        self.post(StepFinished(output))

    def _check_writes(self, plan: StepPlan) -> None:
        """Raises `SimulationError` if a step writes into a block of two sequences, a leased block or a free block."""
        block_size = self.spec.layout.block_size
        written: set[int] = set()
        for chunk in plan.chunks:
            first, last = chunk.start // block_size, (chunk.start + chunk.num_tokens - 1) // block_size
            for block in chunk.sequence.block_table[first : last + 1]:
                held = self.pool.column_of(block) is Column.HELD
                if block in written or self.pool.num_leases(block) or not held:
                    raise SimulationError(
                        f"{self.agent.name}: block {block} of {chunk.sequence.sequence_id} is not its own"
                    )
                written.add(block)

    # ---- calls

    def open_tokens(self, stream: Call, send: SendTokens) -> None:
        """Open a token stream. The first message is empty."""
        self.token_streams[stream.call_id] = stream, send
        send(self, events.StepTokens([], [], [], {}))

    def close_tokens(self, stream: Call) -> None:
        """The token stream broke, or the router ended it: its calls end."""
        if self.token_streams.pop(stream.call_id, None) is None:
            return
        for call in [call for call in self.calls.values() if call.tokens is stream]:
            self.cancel(call)
            self.answer(self, call, TokenStreamEnded("the token stream of this call has ended"))

    def _emit(self, tokens: tuple[TokenEvent, ...]) -> None:
        """Send one message on each token stream that has new tokens."""
        by_stream: dict[str, list[tuple[Call, TokenEvent]]] = {}
        for event in tokens:
            call = self.calls.get(event.sequence_id)
            if call is not None and call.tokens is not None:
                call.num_tokens += 1
                by_stream.setdefault(call.tokens.call_id, []).append((call, event))
        for stream_id, pairs in by_stream.items():
            _, send = self.token_streams[stream_id]
            message = events.StepTokens(
                [call.number for call, _ in pairs],
                [event.index for _, event in pairs],
                [event.token.token_id for _, event in pairs],
                {place: event.token for place, (_, event) in enumerate(pairs) if event.token.logprob is not None},
            )
            send(self, message)

    def accept(self, call: Call, arrived: PrefillArrived | DecodeArrived) -> None:
        self.calls[call.call_id] = call
        if self._inbox is not None:
            self._inbox.append((call, arrived))
            return
        if call.tokens is not None and call.tokens.call_id not in self.token_streams:
            self._end_call(call.call_id, TokenStreamEnded("no such token stream is open"))
            return
        try:
            self.post(arrived)
        except TandemError as error:
            self.machine.check()
            self._world.marks.add(f"{type(error).__name__} of {call.call_id}")
            self._end_call(call.call_id, error)

    def cancel(self, call: Call) -> None:
        """The caller cancelled the call, or its connection broke."""
        if call.worker is CallState.OPEN:
            self._world.note(f"{self.agent.name} <- cancel of {call.call_id}")
            call.worker = CallState.ENDED
            self.calls.pop(call.call_id, None)
            is_prefill = self.spec.role is ServiceRole.PREFILL
            self.post(PrefillCancelled(call.call_id) if is_prefill else DecodeCancelled(call.call_id))

    def _end_call(self, call_id: str, result: Any) -> None:
        call = self.calls.pop(call_id, None)
        if call is not None:
            call.worker = CallState.ENDED
            self.answer(self, call, result)

    # ---- reports

    def snapshot(self) -> events.WorkerJoined:
        """The first message of a report stream, with all changes so far."""
        self._publish()
        view = self.view
        return events.WorkerJoined(
            self.spec.worker_id, self.spec.role, self.address, view.cached_blocks, view.load, view.paths
        )

    def _publish(self, *, unchanged: bool = False) -> None:
        """Send what has changed; without changes, an empty report if `unchanged`."""
        changes = self.view.take_changes(self.view.load)
        if self.subscriber is not None and (changes is not None or unchanged):
            self.subscriber(events.WorkerReported(self.spec.worker_id, changes or WorkerChanges()))

    def _report_changes(self) -> None:
        if self.alive:
            if self._changed and self._inbox is None:
                self._changed = False
                self._publish()
            self._world.after(self.spec.report_interval_s, self._report_changes)

    def _report_idle(self) -> None:
        if self.alive:
            if self._inbox is None:
                self._publish(unchanged=True)
            self._world.after(self.spec.idle_report_interval_s, self._report_idle)

    # ---- faults

    def stop(self) -> None:
        """SIGSTOP: the process handles no event until `resume`."""
        if self.alive and self._inbox is None:
            self._inbox = []

    @property
    def stopped(self) -> bool:
        return self._inbox is not None

    def resume(self) -> None:
        waiting, self._inbox = self._inbox, None
        if not self.alive or waiting is None:
            return
        if self._world.chance(0.5):
            self.post(Tick())
        for item in waiting:
            match item:
                case (Call() as call, arrived):
                    if call.worker is CallState.OPEN:
                        self.accept(call, arrived)
                case _:
                    self.post(item)
        self._timer.update()

    def drain(self) -> None:
        self.post(DrainRequested())

    def die(self, silent: bool, killed: bool) -> None:
        self.alive, self.silent, self.killed = False, silent, killed
        self.token_streams.clear()
        self.agent.die()


def _not_connected(node: WorkerNode, call: Call, result: Any) -> None:
    raise SimulationError(f"{node.spec.worker_id} answers {result} on {call.call_id}, but is not connected")


def _decode_result(done: DecodeDone, num_tokens: int) -> events.DecodeResult:
    timeline = done.timeline
    return events.DecodeResult(
        finish_reason=done.finish_reason,
        num_tokens=num_tokens,
        cached_tokens=done.cached_tokens,
        queue_s=timeline.seconds_in(Stage.QUEUE),
        prefill_s=timeline.seconds_in(Stage.PREFILL),
        transfer_s=timeline.seconds_in(Stage.TRANSFER),
        transfer_exposed_s=0.0,
        transferred_bytes=0 if done.pull is None else done.pull.num_bytes,
        kv_block_seconds=done.kv_block_seconds,
    )


def describe(event: Any) -> str:
    """The name and the subject of an event, for the log."""
    match event:
        case PrefillArrived(request=request) | DecodeArrived(request=request):
            return f"{type(event).__name__} {request.request_id} ({len(request.token_ids)} tokens)"
        case StepFinished(output):
            return f"StepFinished {output.step_id} sampled {list(output.sampled)}"
        case _:
            message = getattr(event, "message", None)
            subject = "" if message is None else f"{type(message).__name__} from {event.peer} "
            transfer_id = getattr(message, "transfer_id", None)
            named = "" if transfer_id is None else f"of {transfer_id % 65536:04x}"
            return f"{type(event).__name__} {subject}{named}".rstrip()
