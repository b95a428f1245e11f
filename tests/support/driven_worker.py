"""The machine of a worker, driven by a test: the test runs each step, delivers each message, and reads the actions.

A step samples as token the number of tokens before it, so a test can predict each token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core.config import SchedulerConfig, TransferConfig
from core.errors import OutOfDeviceMemory, TandemError
from core.handoff import AgentAddress, HandoffMessage
from core.kv_layout import KVLayout
from core.machine import Tick
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.step import SampledToken, StepOutput, StepPlan
from decode_worker.machine import DecodeMachine
from kv_transfer.protocol.events import MessageReceived, SendMessage
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import PrefillMachine
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
    """`me` and `peer` are agents. Each message of the peer gets the next counter."""

    def __init__(
        self,
        build: Callable[[WorkerCore, TransferMachine], PrefillMachine | DecodeMachine],
        num_blocks: int = 16,
        scheduler: SchedulerConfig | None = None,
        plans_ahead: bool = False,
    ) -> None:
        self.now = 50.0
        self.me, self.peer = address("me", num_blocks), address("peer")
        self.pool = BlockPool(num_blocks)
        config = scheduler or SchedulerConfig(max_batched_tokens=8, max_running=4, max_waiting=8)
        self.core = WorkerCore(Scheduler(config, self.pool, BLOCK_SIZE, frozenset({EOS})), self.pool, plans_ahead)
        transfers = TransferMachine(TransferConfig(lease_s=LEASE_S, transport="memory"), self.pool, self.me)
        self.machine = build(self.core, transfers)
        self._by_kind: defaultdict[type, list[Any]] = defaultdict(list)  # all actions, and the messages in them
        self.plans: list[StepPlan] = []  # the steps in flight, oldest first
        self._counter = 0

    # ---- driving

    def post(self, event: Any) -> list[Any]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        for action in actions:
            self._by_kind[type(action)].append(action)
            if isinstance(action, SendMessage):
                self._by_kind[type(action.message)].append(action.message)
            if isinstance(action, RunStep):
                assert not self.plans or self.core.plans_ahead, "one step at a time"
                self.plans.append(action.plan)
        return actions

    def finish_step(self, *failed: str, seconds: float | None = None, **tokens: int) -> list[Any]:
        """End the oldest step in flight. `failed`: sequences that the device had no memory for. `tokens` replaces
        sampled tokens, by sequence id. `seconds`: what the engine has measured."""
        assert self.plans, "no step is in flight"
        plan = self.plans.pop(0)
        sampled = {
            chunk.sequence.sequence_id: (
                SampledToken(tokens.get(chunk.sequence.sequence_id, chunk.start + chunk.num_tokens)),
            )
            for chunk in plan.chunks
            if chunk.samples and chunk.sequence.sequence_id not in failed
        }
        errors = {name: OutOfDeviceMemory(f"no memory for {name}") for name in failed}
        return self.post(StepFinished(StepOutput(plan.step_id, sampled, errors, seconds)))

    def fail_step(self) -> list[Any]:
        self.plans.clear()
        return self.post(StepFailed(TandemError("the step failed")))

    def run_until_idle(self) -> None:
        for _ in range(200):
            if not self.plans:
                return
            self.finish_step()
        raise AssertionError("still not idle after 200 steps")

    def hear(self, make: Callable[[int, int], HandoffMessage]) -> list[Any]:
        """Deliver a message of the peer. `make` gets the incarnation and the counter."""
        self._counter += 1
        return self.post(MessageReceived(self.peer.name, make(self.peer.incarnation, self._counter)))

    def pass_time(self, seconds: float) -> list[Any]:
        end, actions = self.now + seconds, []
        while (deadline := self.machine.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            actions += self.post(Tick())
        self.now = end
        return actions

    # ---- reading

    def of(self, kind: type[A]) -> list[A]:
        return list(self._by_kind[kind])

    def only(self, kind: type[A]) -> A:
        (action,) = self.of(kind)
        return action

    def sent(self, kind: type[A]) -> list[A]:
        """The messages of this kind to the peer."""
        return list(self._by_kind[kind])

    def chunks(self, step: int = 0) -> list[tuple[str, int, int]]:
        """(sequence, start, tokens) of a step in flight, by default of the oldest one."""
        chunks = self.plans[step].chunks if len(self.plans) > step else ()
        return [(chunk.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in chunks]

    @property
    def ledger(self) -> dict[str, int]:
        """The columns that have blocks, without FREE and CACHED."""
        kept = (Column.HELD, Column.LEASED, Column.INCOMING)
        return {column.value: count for column, count in self.pool.ledger().items() if count and column in kept}
