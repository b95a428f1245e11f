"""Drives a RouterMachine in a test: workers join by name, the test sets the time, and all actions are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from core.config import RouterConfig
from core.errors import TandemError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason, ServiceRole, WorkerState
from core.machine import Tick
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.step import SampledToken
from router.requests import events
from router.requests.events import RouterAction, RouterEvent
from router.requests.machine import RouterMachine

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=1)
NUM_BLOCKS = 64
SERVING = WorkerLoad(state=WorkerState.SERVING, ledger={Column.FREE: NUM_BLOCKS})
EOS = 0
CONFIG = RouterConfig(
    local_prefill="never", max_attempts=3, report_stale_s=3.0, worker_lost_s=10.0, worker_wait_s=20.0, max_queued=2
)

A = TypeVar("A")


def agent(
    worker_id: str, incarnation: int = 1, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS
) -> AgentAddress:
    return AgentAddress(f"{worker_id}@{incarnation}", incarnation, b"", 0, num_blocks, layout, 20.0)


def request(
    name: str = "r", prompt: Sequence[int] = tuple(range(1, 9)), max_tokens: int = 4, **options: object
) -> Request:
    priority = options.pop("priority", 0)
    sampling = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), len(prompt), sampling, priority=int(str(priority)))


def step_tokens(*tokens: tuple[int, int, SampledToken]) -> events.StepTokens:
    """A message of a token stream with (number of the call, index in the output, token)."""
    return events.StepTokens(
        [call for call, _, _ in tokens],
        [index for _, index, _ in tokens],
        [token.token_id for _, _, token in tokens],
        {place: token for place, (_, _, token) in enumerate(tokens) if token.logprob is not None},
    )


class DrivenRouter:
    def __init__(self, config: RouterConfig = CONFIG, prefill: Sequence[str] = ("P",), decode: Sequence[str] = ("D",)):
        self.now = 100.0
        self.tickets = iter(range(1, 1000))
        self.machine = RouterMachine(config, lambda: next(self.tickets), frozenset({EOS}))
        self.actions: list[RouterAction] = []
        self.sent: dict[str, set[int]] = {}  # dispatch id -> indexes that the decode worker has put on its stream
        for name in prefill:
            self.join(name, ServiceRole.PREFILL)
        for name in decode:
            self.join(name, ServiceRole.DECODE)

    # ---- events

    def post(self, event: RouterEvent) -> list[RouterAction]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        self.actions += actions
        return actions

    def join(self, name: str, role: ServiceRole, incarnation: int = 1, layout: KVLayout = LAYOUT) -> list[RouterAction]:
        address = agent(name, incarnation, layout)
        return self.post(events.WorkerJoined(name, role, address, cached_blocks=(), load=SERVING))

    def report(self, name: str, state: WorkerState = WorkerState.SERVING, **load: object) -> list[RouterAction]:
        reported = replace(SERVING, state=state, **load)  # type: ignore[arg-type]
        return self.post(events.WorkerReported(name, WorkerChanges(reported)))

    def store(self, name: str, *sequence_hashes: int) -> list[RouterAction]:
        """A worker reports new blocks in its prefix cache."""
        return self.post(events.WorkerReported(name, WorkerChanges(blocks=((sequence_hashes, True),))))

    def arrive(
        self, arriving: Request | None = None, timeout_s: float = 60.0, others: Sequence[Request] = ()
    ) -> list[RouterAction]:
        arrived = events.RequestArrived(arriving or request(), self.now, self.now + timeout_s, tuple(others))
        return self.post(arrived)

    def first_token(self, token: int, dispatch: str = "r#1", index: int = 0) -> list[RouterAction]:
        result = events.PrefillResult(index, SampledToken(token), None, 0, 0.0, 0.0)
        return self.post(events.PrefillReturned(dispatch, result))

    def tokens(self, first: int, *token_ids: int, dispatch: str = "r#1") -> list[RouterAction]:
        return self.sampled_tokens(first, *map(SampledToken, token_ids), dispatch=dispatch)

    def sampled_tokens(self, first: int, *tokens: SampledToken, dispatch: str = "r#1") -> list[RouterAction]:
        """A message of the token stream with tokens of one call."""
        self.sent.setdefault(dispatch, set()).update(range(first, first + len(tokens)))
        return self.post(step_tokens(*((self.call_of(dispatch), first + i, token) for i, token in enumerate(tokens))))

    def call_of(self, dispatch: str) -> int:
        """The number of the decode call; 0 if the dispatch never started."""
        return next((start.call for start in self.of(events.StartDecode) if start.dispatch_id == dispatch), 0)

    def decoded(
        self, dispatch: str = "r#1", reason: FinishReason = FinishReason.LENGTH, num_tokens: int | None = None
    ) -> list[RouterAction]:
        """By default, all tokens of the worker have arrived."""
        count = num_tokens or len(self.sent.get(dispatch, ())) or 1
        return self.post(events.DecodeReturned(dispatch, events.DecodeResult(reason, count, 0, 0.0, 0.0, 0.0, 0.0, 0)))

    def decode_fails(self, error: TandemError, dispatch: str = "r#1") -> list[RouterAction]:
        return self.post(events.DecodeReturned(dispatch, error))

    def prefill_fails(self, error: TandemError, dispatch: str = "r#1") -> list[RouterAction]:
        return self.post(events.PrefillReturned(dispatch, error))

    def pass_time(self, seconds: float) -> list[RouterAction]:
        """Let time pass, with a Tick at each deadline."""
        end, actions = self.now + seconds, []
        while (deadline := self.machine.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            actions += self.post(Tick())
        self.now = end
        return actions

    # ---- actions

    def delivered(self, request_id: str = "r") -> list[int]:
        """Delivered token ids. Asserts that each index came once and in order."""
        got: list[int] = []
        for action in self.of(events.Deliver):
            if action.request_id == request_id:
                assert action.first_index == len(got)
                got += action.token_ids
        return got

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def only(self, kind: type[A]) -> A:
        (action,) = self.of(kind)
        return action

    def dispatches(self) -> list[tuple[str, str | None, str]]:
        """(dispatch id, prefill worker, decode worker) of each dispatch, in order."""
        prefill = {action.dispatch_id: action.worker_id for action in self.of(events.StartPrefill)}
        return [(a.dispatch_id, prefill.get(a.dispatch_id), a.worker_id) for a in self.of(events.StartDecode)]
