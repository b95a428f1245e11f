"""The machine of a worker, driven by a test: the test ends each step, lets time pass, and reads the actions.

A step samples as token the number of tokens before it, so a test can predict each token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from core.config import SchedulerConfig, TransferConfig
from core.errors import OutOfDeviceMemory, TandemError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.machine import Tick
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.step import SampledToken, StepOutput, StepPlan
from decode_worker.machine import DecodeMachine
from kv_transfer.protocol.events import SendMessage
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import PrefillMachine
from tests.support.deadlines import deadlines_until
from worker.core import RunStep, StepFailed, StepFinished, WorkerCore

BLOCK_SIZE = 4
EOS = 63
LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=1)
LEASE_S = 12.0

A = TypeVar("A")


def address(name: str, num_blocks: int = 32, layout: KVLayout = LAYOUT) -> AgentAddress:
    return AgentAddress(name, 1, b"", 0, num_blocks, layout, LEASE_S)


def request(
    name: str, num_tokens: int, max_tokens: int = 4, first: int = 1, priority: int = 0, resumed: Sequence[int] = ()
) -> Request:
    """A request whose prompt counts up from `first` for `num_tokens` tokens."""
    prompt = tuple(range(first, first + num_tokens))
    return Request(name, prompt + tuple(resumed), num_tokens, SamplingParams(max_tokens=max_tokens), priority=priority)


class DrivenWorker:
    machine: PrefillMachine | DecodeMachine

    def begin(self, *, is_prefill: bool, blocks: int = 16, pulls: int = 4, ahead: int = 0, **limits: int) -> None:
        """A new worker: at most `pulls` hand-offs wait, and with `ahead` it plans one step ahead."""
        self.now = 50.0
        self.me, self.peer = address("me", blocks), address("peer")
        self.pool = BlockPool(blocks)
        config = SchedulerConfig(**({"max_batched_tokens": 8, "max_running": 4, "max_waiting": 8} | limits))
        self.core = WorkerCore(Scheduler(config, self.pool, BLOCK_SIZE, frozenset({EOS})), self.pool, bool(ahead))
        transfers = TransferMachine(TransferConfig(lease_s=LEASE_S, transport="memory"), self.pool, self.me)
        if is_prefill:
            self.machine = PrefillMachine(self.core, transfers)
        else:
            self.machine = DecodeMachine(self.core, transfers, max_pulls_waiting=pulls)
        self._by_kind: defaultdict[type, list[Any]] = defaultdict(list)  # all actions, and the messages in them
        self.plans: list[StepPlan] = []  # the steps in flight, oldest first

    def post(self, event: Any) -> list[Any]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        assert self.machine.transfers_alive == self.machine.transfers.alive
        for action in actions:
            self._by_kind[type(action)].append(action)
            if isinstance(action, SendMessage):
                self._by_kind[type(action.message)].append(action.message)
        self.plans += [action.plan for action in actions if isinstance(action, RunStep)]
        assert len(self.plans) <= 1 + self.core.plans_ahead, "one step at a time"
        return actions

    def step(self, no_memory: str = "", seconds: float | None = None, **tokens: int) -> list[Any]:
        """End the oldest step in flight. `no_memory`: a sequence that the device had none for. `tokens` replaces
        sampled tokens, by sequence id. `seconds`: what the engine has measured."""
        assert self.plans, "no step is in flight"
        plan = self.plans.pop(0)
        sampled = {
            chunk.sequence.sequence_id: (
                SampledToken(tokens.get(chunk.sequence.sequence_id, chunk.start + chunk.num_tokens)),
            )
            for chunk in plan.chunks
            if chunk.samples and chunk.sequence.sequence_id != no_memory
        }
        errors = {no_memory: OutOfDeviceMemory(f"no memory for {no_memory}")} if no_memory else {}
        return self.post(StepFinished(StepOutput(plan.step_id, sampled, errors, seconds)))

    def fail_step(self) -> list[Any]:
        self.plans.clear()
        return self.post(StepFailed(TandemError("the step failed")))

    def wait(self, seconds: float) -> list[Any]:
        end, actions = self.now + seconds, []
        for deadline in deadlines_until(end, self.machine.next_deadline):
            self.now = max(self.now, deadline)
            actions += self.post(Tick())
        self.now = end
        return actions

    def of(self, kind: type[A]) -> list[A]:
        """The actions of this kind, or the messages of this kind to the peer."""
        return list(self._by_kind[kind])

    @property
    def decoder(self) -> DecodeMachine:
        assert isinstance(self.machine, DecodeMachine)
        return self.machine

    @property
    def ledger(self) -> dict[str, int]:
        """The columns that have blocks, without FREE and CACHED."""
        kept = (Column.HELD, Column.LEASED, Column.INCOMING)
        return {column.value: count for column, count in self.pool.ledger().items() if count and column in kept}
