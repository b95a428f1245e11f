"""A simulated worker process: it drives the production machine of its role in virtual time.

    calls, notifications, finished steps --post--> machine --actions--> agent, executor, answers of calls

The clock of the process has an offset to the clock of the world. The process may be stopped for a while; its events
wait in an inbox. The process may die: its calls break at once, or (silent death) its peers receive nothing any more.
`WorkerSpec` has the costs and the faults of steps; a replay has no fault and no KV content.

Reports follow worker/reports.py: at once after a change, then at most one per `report_interval_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.cost.step_cost_fit import StepCostFit
from core.errors import TandemError, TokenStreamEnded, WorkerDrains
from core.handoff import AgentAddress
from core.lifecycle import MoveReason, ServiceRole, Stage
from core.machine import Tick
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.worker_load import WorkerChanges
from core.step import TokenEvent
from decode_worker.events import (
    AskToMove,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeFailed,
    EmitTokens,
    HandedOver,
    HandoffArrived,
    MoveArrived,
    ResumeArrived,
)
from decode_worker.machine import LOST_ITS_BLOCKS, DecodeMachine
from decode_worker.moves import Moves, MoveState
from decode_worker.pull_queue import PullQueue
from kv_transfer.protocol.events import AgentAction
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import (
    OfferWithdrawn,
    PrefillArrived,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillMachine,
)
from router.requests import events
from simulator.shells.agent import SimulatedAgent
from simulator.shells.authorship import Authorship
from simulator.shells.disk import SimulatedDisk, Slots
from simulator.shells.fairness import HandOffsAsk, TenantShares
from simulator.shells.steps import SimulatedExecutor
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.calls import Call
from simulator.virtual.faults import ReadFaults
from simulator.virtual.machine_timer import MachineTimer
from simulator.virtual.memory import EOS_TOKEN_IDS, BlankMemory, Memory
from simulator.virtual.network import Network
from simulator.virtual.world import SimulationError, World
from worker.core import DrainRequested, RunStep, StepFinished, WorkerCore
from worker.prefixes import PrefixRequested, PulledPrefix
from worker.tier.disk_tier import DiskTier
from worker.tier.events import EraseSlot, GiveUpRead, ReadBlocks, WriteBlocks
from worker.tier.names import identity_of
from worker.tier.slot_file import newest_of_each_name
from worker.tier.slot_table import SlotTable
from worker.view import WorkerMachineView

TOLERANCE_S = 0.001  # of a timer

Asked = MoveArrived | ResumeArrived | PrefixRequested | OfferWithdrawn | HandoffArrived
SendReport = Callable[[events.WorkerJoined | events.WorkerReported], None]


class WorkerShell:
    """One incarnation of one worker."""

    def __init__(
        self,
        world: World,
        spec: WorkerSpec,
        incarnation: int = 1,
        clock_offset_s: float = 0.0,
        authorship: Authorship | None = None,
        slots: Slots | None = None,
    ) -> None:
        """`slots`: of the disk, as earlier incarnations have left them."""
        self.spec, self._authorship = spec, authorship
        self._slots: Slots = {} if slots is None else slots
        self.alive = True
        self.silent = False  # died, and its connections did not break
        self.killed = False  # died, and its last answers may be lost
        self.calls: dict[str, Call] = {}  # open at this end
        self.token_streams: dict[str, Call] = {}  # open at this end, by call id
        self._world, self._clock_offset_s = world, clock_offset_s
        self._inbox: list[Any] | None = None  # while stopped
        self.disk: SimulatedDisk | None = None
        self._subscribers: dict[str, SendReport] = {}  # by router
        self._changed = False  # since the last report
        self._next_report_at = 0.0
        self._reported_at = 0.0  # a look that finds no change sends nothing
        self._used_sum, self._num_samples = 0.0, 0
        self._resumed_at = 0.0  # after a stop
        self._num_preemptions = 0
        self._hand_offs: HandOffsAsk | None = None  # of a decode worker
        self._shares: TenantShares | None = None  # of a worker with our scheduler
        self.name = f"{spec.worker_id}@{incarnation:04x}"
        self._build(incarnation)
        self._timer = MachineTimer(world, self.machine, self._on_tick, clock_offset_s)
        world.after(spec.worker.idle_report_interval_s, self._report_idle)

    def _build(self, incarnation: int) -> None:
        """The machine, and what it drives."""
        spec = self.spec
        self.pool = BlockPool(spec.num_blocks)
        block_size = spec.layout.block_size
        memory = (
            Memory(spec.num_blocks, block_size, incarnation, spec.draft_accuracy, spec.rounding)
            if spec.has_content
            else BlankMemory(block_size)
        )
        self.agent = SimulatedAgent(self.name, self.pool, memory, spec, self.post)
        self.executor = SimulatedExecutor(self._world, spec, self.pool, memory, self.post, self._authorship)
        self.address = AgentAddress(
            self.name, incarnation, b"", 0, spec.num_blocks, spec.layout, spec.transfer.lease_s, spec.probe_bytes,
            spec.location,
        )  # fmt: skip
        scheduler = Scheduler(spec.scheduler, self.pool, spec.layout.block_size, EOS_TOKEN_IDS)
        core = WorkerCore(scheduler, self.pool, costs=StepCostFit(spec.known_cost))
        if spec.disk_slots:
            stored = newest_of_each_name({slot: header for slot, (header, _) in self._slots.items()})
            table = SlotTable(spec.disk_slots, stored)
            core.tier = DiskTier(self.pool, spec.layout.block_bytes, identity_of(spec.layout), table)
            self.disk = SimulatedDisk(self._world, self._slots, memory, spec, self.post)
        self._drive(core, TransferMachine(spec.transfer, self.pool, self.address))

    def join(self, network: Network, agents: dict[str, SimulatedAgent], faults: ReadFaults) -> None:
        """`agents` has those of the fleet by name."""
        self.agent.join(self._world, network, agents, faults)

    def _drive(self, core: WorkerCore, transfers: TransferMachine) -> None:
        """The machine of the present role."""
        core.take_role(speculates=not self.is_prefill)
        if self.is_prefill:
            self.machine: Any = PrefillMachine(core, transfers)
            self._hand_offs = None
        else:
            self.machine = DecodeMachine(core, transfers, self.spec.worker.max_pulls_waiting)
            self._hand_offs = HandOffsAsk(self.machine)
        self._shares = TenantShares(core.scheduler, self.pool)
        self.view: Any = WorkerMachineView(self.machine)

    @property
    def is_prefill(self) -> bool:
        return self.spec.role is ServiceRole.PREFILL

    # ---- the driver

    @property
    def clock(self) -> float:
        return self._world.now + self._clock_offset_s

    def post(self, event: Any) -> None:
        if not self.alive:
            return
        if self._inbox is not None:
            self._inbox.append(event)
            return
        actions = self.machine.handle(event, self.clock)
        if self._world.is_checked and not isinstance(event, Tick):
            self._world.note(f"{self.name} <- {describe(event)}")
        for action in actions:
            self._perform(action)
        if self._world.is_checked:
            self._check()
        self._mark_changed()
        self._timer.update()

    def _check(self) -> None:
        self.machine.check()
        if isinstance(self.machine, DecodeMachine):
            self._count_pulls(self.machine.pulls)
            self._check_pauses(self.machine.moves)
            self._mark_preempted(self.machine.core.scheduler)
        if self._hand_offs is not None:
            self._world.counts["hand-off waits for blocks"] += self._hand_offs.check() > 0
        if self._shares is not None:
            self._world.counts["tenants share a worker"] += self._shares.check() > 0

    def _mark_preempted(self, scheduler: Scheduler) -> None:
        if scheduler.num_preemptions != self._num_preemptions:
            self._num_preemptions = scheduler.num_preemptions
            known = (*scheduler.waiting, *scheduler.running)  # one that is preempted may run again in the same plan
            self._world.marks.update(f"preemption of {each.sequence_id}" for each in known if each.num_preemptions)

    def _count_pulls(self, pulls: PullQueue) -> None:
        """Count the events after which hand-offs compete for blocks."""
        half_pulled, is_blocked = pulls.num_half_pulled, pulls.blocked_rank is not None
        self._world.counts["half-pulled together"] += half_pulled > 1
        self._world.counts["half-pulled while another is blocked"] += bool(half_pulled and is_blocked)

    def _check_pauses(self, moves: Moves) -> None:
        """A paused sequence is released, resumed or ended within a lease, but for the time in which nothing runs."""
        for move in moves.by_id.values():
            self._world.counts[f"move {move.state.value}"] += 1
            since = max(move.since, self._resumed_at)
            if move.state is MoveState.HANDED_OVER and self.clock > since + self.spec.transfer.lease_s + TOLERANCE_S:
                raise SimulationError(
                    f"seed {self._world.seed}: {move.sequence.sequence_id} is paused for more than a lease"
                )

    def _on_tick(self, tick: Tick) -> None:
        if self._inbox is None:
            self.post(tick)  # else `resume` sets the timer again

    # ---- acting

    def _perform(self, action: Any) -> None:
        match action:
            case RunStep():
                self.executor.run(action)
            case EmitTokens(tokens):
                self._emit(tokens)
            case AskToMove(request_ids, reason):
                for call_id in request_ids:
                    self._world.counts[f"asks for a move: {reason.value}"] += 1
                    self._notify(call_id, None, reason)
            case HandedOver(call_id, first_index):
                self._notify(call_id, first_index)
            case PrefillDone(request_id=call_id):
                self._count_prefix(action.prefix)
                self._end_call(call_id, _prefill_result(action))
            case DecodeDone(request_id=call_id):
                self._count_prefix(action.prefix)
                call = self.calls.get(call_id)
                self._end_call(call_id, _decode_result(action, 0 if call is None else call.num_tokens))
            case PrefillFailed(call_id, error) | DecodeFailed(call_id, error):
                if str(error) == LOST_ITS_BLOCKS:
                    self._world.marks.add(f"preemption of {call_id}")
                self._end_call(call_id, error)
            case WriteBlocks() | EraseSlot() | ReadBlocks() | GiveUpRead():
                assert self.disk is not None, "a machine without a tier uses the disk"
                self.disk.perform(action)
            case _:
                if not isinstance(action, AgentAction):
                    raise SimulationError(f"no code performs {action}")
                self.agent.perform(action)

    # ---- calls

    def close_tokens(self, stream: Call) -> None:
        """The token stream broke, or the router ended it: its calls end."""
        if self.token_streams.pop(stream.call_id, None) is None:
            return
        for call in [call for call in self.calls.values() if call.tokens is stream]:
            self.cancel(call.call_id)
            call.reply(TokenStreamEnded("the token stream of this call has ended"))

    def _emit(self, tokens: tuple[TokenEvent, ...]) -> None:
        """Send one message on each token stream that has new tokens."""
        by_stream: dict[str, list[tuple[int, TokenEvent]]] = {}
        for event in tokens:
            call = self.calls.get(event.sequence_id)
            if call is not None and call.tokens is not None:
                call.num_tokens += 1
                if self._authorship is not None:
                    self._authorship.emitted(call, event.index, event.token.token_id)
                by_stream.setdefault(call.tokens.call_id, []).append((call.number, event))
        for stream_id, pairs in by_stream.items():
            message = events.StepTokens(
                [number for number, _ in pairs],
                [event.index for _, event in pairs],
                [event.token.token_id for _, event in pairs],
                {place: event.token for place, (_, event) in enumerate(pairs) if event.token.logprob is not None},
            )
            self.token_streams[stream_id].reply(message)

    def _notify(self, call_id: str, first_index: int | None, reason: MoveReason = MoveReason.DRAIN) -> None:
        """Send a notice of a move on the token stream of its call, if that stream has not ended."""
        call = self.calls.get(call_id)
        if call is not None and call.tokens is not None and call.tokens.call_id in self.token_streams:
            notice = events.MoveNotice(call.number, first_index, reason)
            self.token_streams[call.tokens.call_id].reply(events.StepTokens((), (), (), {}, [notice]))

    def ask(
        self,
        event: Asked,
        refuse: Callable[[TandemError], None] = lambda _: None,
    ) -> None:
        """`refuse` gets the error of a move, an offer or a hand-off that cannot begin."""
        if self._inbox is not None:
            self._inbox.append((event, refuse))
            return
        try:
            if not isinstance(event, PrefixRequested) and self.is_prefill is not isinstance(event, OfferWithdrawn):
                raise WorkerDrains(f"this worker serves as {self.spec.role.value} worker")
            self.post(event)
        except TandemError as error:
            self._world.counts[f"refused {type(event).__name__}"] += 1
            refuse(error)

    def accept(self, call: Call, arrived: Callable[[float], PrefillArrived | DecodeArrived]) -> None:
        """Start a call. `arrived` takes the time of this process."""
        self.calls[call.call_id] = call
        if self._authorship is not None and call.role is ServiceRole.DECODE:
            self._authorship.accepted(call)
        self._accept(call, arrived(self.clock))

    def _accept(self, call: Call, arrived: PrefillArrived | DecodeArrived) -> None:
        if self._inbox is not None:
            self._inbox.append((call, arrived))
            return
        if call.role is not self.spec.role:
            self._end_call(call.call_id, WorkerDrains(f"this worker serves as {self.spec.role.value} worker"))
            return
        if call.tokens is not None and call.tokens.call_id not in self.token_streams:
            self._end_call(call.call_id, TokenStreamEnded("no such token stream is open"))
            return
        try:
            self.post(arrived)
        except TandemError as error:
            if self._world.is_checked:
                self.machine.check()
            self._world.marks.add(f"{type(error).__name__} of {call.call_id}")
            self._end_call(call.call_id, error)

    def cancel(self, call_id: str) -> None:
        """The caller cancelled the call, or its connection broke."""
        if self.calls.pop(call_id, None) is not None:
            self._world.note(f"{self.name} <- cancel of {call_id}")
            self.post(PrefillCancelled(call_id) if self.is_prefill else DecodeCancelled(call_id))

    def _count_prefix(self, prefix: PulledPrefix | None) -> None:
        if prefix is not None:
            self._world.counts["prefix read" if prefix.num_tokens else "prefix not read"] += 1

    def _end_call(self, call_id: str, result: Any) -> None:
        call = self.calls.pop(call_id, None)
        if call is not None:
            call.reply(result)

    def returned(self, call: Call, result: Any) -> events.PrefillReturned | events.DecodeReturned:
        """The event of the router's machine at the end of this call."""
        is_prefill = call.role is ServiceRole.PREFILL
        return (events.PrefillReturned if is_prefill else events.DecodeReturned)(call.call_id, result)

    # ---- reports

    def subscribe(self, router: str, send: SendReport) -> None:
        """Send the snapshot now, and every report from now on. A router has one subscription at a time."""
        self._publish()  # the snapshot has all changes so far
        spec, view = self.spec, self.view
        send(events.WorkerJoined(spec.worker_id, spec.role, self.address, view.cached_blocks, view.load, view.paths))
        self._subscribers[router] = send

    def _mark_changed(self) -> None:
        if not self._changed:
            self._changed = True
            self._world.at(self._next_report_at, self._report_change)

    def _report_change(self) -> None:
        if self._changed and self._inbox is None and self.alive:
            self._publish()
        self._changed = False  # a stopped process reports after its next event

    def _report_idle(self) -> None:
        if self.alive:
            if self._inbox is None and self._world.now >= self._reported_at + self.spec.worker.report_interval_s:
                self._publish(unchanged=True)
            self._world.after(self.spec.worker.idle_report_interval_s, self._report_idle)

    def _publish(self, *, unchanged: bool = False) -> None:
        """Send what has changed; without changes, an empty report if `unchanged`."""
        self._changed = False
        self._next_report_at = self._world.now + self.spec.worker.report_interval_s
        changes = self.view.take_changes(self.view.load)
        if changes is not None or unchanged:
            self._reported_at = self._world.now
            report = events.WorkerReported(self.spec.worker_id, changes or WorkerChanges())
            for send in self._subscribers.values():
                send(report)

    # ---- use of the pool

    def sample_pool(self) -> None:
        ledger = self.pool.ledger()
        self._used_sum += 1.0 - (ledger[Column.FREE] + ledger[Column.CACHED]) / self.pool.num_blocks
        self._num_samples += 1

    @property
    def mean_used(self) -> float:
        """Mean share of blocks with a holder or a reader, over the samples."""
        return self._used_sum / max(1, self._num_samples)

    @property
    def cached_blocks(self) -> set[int]:
        """Sequence hashes in the prefix cache, and on disk."""
        return set(self.view.cached_blocks)

    @property
    def kept_blocks(self) -> dict[str, int]:
        """Blocks with a holder or a reader, by column of the ledger."""
        ledger = self.pool.ledger()
        return {column.value: ledger[column] for column in (Column.HELD, Column.LEASED, Column.INCOMING)}

    def count(self, counts: Counter[str]) -> None:
        """Add what happened in the machine."""
        transfers = self.machine.transfers.counters
        counts["expired lease"] += transfers.offers["expired"]
        counts["completed pull"] += transfers.pulls["complete"]
        counts["failed pull"] += transfers.pulls["failed"]
        counts["cancelled pull"] += transfers.pulls["cancelled"]
        counts["digest mismatch"] += transfers.num_digest_mismatches
        counts["READY repeated"] += transfers.num_ready_repeated
        scheduler = self.machine.core.scheduler
        counts["preemption"] += scheduler.num_preemptions
        counts["right guess"] += scheduler.num_right_drafts
        counts["wrong guess"] += scheduler.num_drafts - scheduler.num_right_drafts
        for why, count in transfers.dropped.items():
            counts[f"dropped: {why.value}"] += count

    # ---- faults of the process

    def stop(self) -> None:
        """SIGSTOP: the process handles no event until `resume`."""
        if self.alive and self._inbox is None:
            self._inbox = []

    @property
    def stopped(self) -> bool:
        return self._inbox is not None

    def resume(self) -> None:
        waiting, self._inbox = self._inbox, None
        self._resumed_at = self.clock
        if not self.alive or waiting is None:
            return
        if self._world.chance(0.5):
            self.post(Tick())
        for item in waiting:
            match item:
                case (Call() as call, arrived):
                    if self.calls.get(call.call_id) is call:
                        self._accept(call, arrived)
                case (
                    MoveArrived() | ResumeArrived() | PrefixRequested() | OfferWithdrawn() | HandoffArrived() as event,
                    refuse,
                ):
                    self.ask(event, refuse)
                case _:
                    self.post(item)
        self._timer.update()

    def drain(self) -> None:
        self.post(DrainRequested())

    @property
    def is_idle(self) -> bool:
        """The process runs, and has nothing left to do."""
        return self.alive and not self.stopped and bool(self.view.is_idle)

    def switch_role(self) -> None:
        """The idle worker serves in the other role, as `WorkerService.switch_role` of the worker. The streams end."""
        machine, role = self.machine, ServiceRole.DECODE if self.is_prefill else ServiceRole.PREFILL
        for stream in list(self.token_streams.values()):
            self.close_tokens(stream)
            stream.reply(TokenStreamEnded("this worker changes its role"))
        self._subscribers.clear()
        self.spec = replace(self.spec, role=role)
        self._timer.stop()
        self._drive(machine.core, machine.transfers)
        self._timer = MachineTimer(self._world, self.machine, self._on_tick, self._clock_offset_s)
        self.post(Tick())

    def die(self, silent: bool, killed: bool) -> None:
        self.alive, self.silent, self.killed = False, silent, killed
        self._end_parts()
        self.token_streams.clear()

    def _end_parts(self) -> None:
        self.executor.alive = self.agent.alive = False
        if self.disk is not None:
            self.disk.alive = False


def _prefill_result(done: PrefillDone) -> events.PrefillResult:
    timeline = done.timeline
    return events.PrefillResult(
        done.index, done.token, done.finish_reason, done.cached_tokens,
        timeline.seconds_in(Stage.QUEUE), timeline.seconds_in(Stage.PREFILL), kv_block_seconds=done.kv_block_seconds,
        read_bytes=0 if done.prefix is None else done.prefix.num_bytes,
        read_tokens=None if done.prefix is None else done.prefix.num_tokens, handoff=done.handoff,
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
        recomputed_tokens=done.num_recomputed_tokens,
        read_bytes=0 if done.prefix is None else done.prefix.num_bytes,
        read_tokens=None if done.prefix is None else done.prefix.num_tokens,
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
