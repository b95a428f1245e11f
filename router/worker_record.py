"""One worker, as the router sees it: its newest report, reconciled with the calls of this router.

A report counts the calls of all routers that had arrived when its load was taken. Calls of this router with a higher
number are on the way; the router adds them. So the view is the report plus what the report cannot have yet, and several
routers see the same truth:

    prompt work = as reported + that of calls on the way x the routers with open calls
    sequences   = as reported - those of this router + the open calls of this router, which it knows exactly

The calls of other routers on the way are unseen. The other routers see the same reports and choose alike, so each call
of this router on the way stands for one of every router. Otherwise all routers choose the same worker between two
reports.

A call that never arrives ends at this router, like every other call, and then counts no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.block_pool import Column
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PathStatus
from core.worker_load import RouterCalls, WorkerLoad, size_class
from router.policy import WorkerView

_NO_CALLS = RouterCalls()

RATE_INTERVAL_S = 1.0  # between two measurements of the blocks that a worker releases


@dataclass(frozen=True, slots=True)
class CallWork:
    """What a call brings to its worker."""

    prompt_s: float = 0.0  # of prompt work
    num_tokens: int = 0  # that a new sequence in decode attends to; 0 = the call brings none
    num_blocks: int = 0  # that it takes


@dataclass(slots=True, eq=False)
class WorkerRecord:
    worker_id: str
    role: ServiceRole
    agent: AgentAddress
    load: WorkerLoad
    reported_at: float
    router_id: str  # of this router
    max_in_flight: int  # of all routers together
    num_routers: int = 1  # with open calls on any worker; this router counts always
    paths: dict[str, PathStatus] = field(default_factory=dict)  # over which the worker reads, by peer
    suspect: bool = False  # a call failed; the router dispatches nothing to the worker until its next report
    dispatched: dict[str, int] = field(default_factory=dict)  # open dispatches of this router -> number of the call
    on_the_way: dict[int, CallWork] = field(default_factory=dict)  # calls that no report has yet
    blocks_released_per_s: float = 0.0
    _released_at: tuple[float, int] | None = None  # time and count of the last measurement
    view: WorkerView = field(init=False)
    has_room: bool = field(init=False)

    def __post_init__(self) -> None:
        self.refresh()

    def take_load(self, load: WorkerLoad) -> None:
        """The load of a report. The numbers of `on_the_way` rise, as does the highest call of each report."""
        self.load = load
        self._measure_release()
        last_call = load.router_calls.get(self.router_id, _NO_CALLS).last_call
        while self.on_the_way and (first := next(iter(self.on_the_way))) <= last_call:
            del self.on_the_way[first]
        self.refresh()

    def _measure_release(self) -> None:
        now, count = self.reported_at, self.load.num_released_blocks
        if self._released_at is None:
            self._released_at = now, count
            return
        before, last_count = self._released_at
        if now >= before + RATE_INTERVAL_S:
            rate = (count - last_count) / (now - before)
            known = self.blocks_released_per_s
            self.blocks_released_per_s = rate if known <= 0.0 else known + (rate - known) / 4
            self._released_at = now, count

    def add_call(self, dispatch_id: str, number: int, work: CallWork) -> None:
        """A call that starts now."""
        self.dispatched[dispatch_id] = number
        self.on_the_way[number] = work
        self.refresh()

    def remove_call(self, dispatch_id: str) -> None:
        """Forget a call that has ended. Does nothing if it is not known."""
        number = self.dispatched.pop(dispatch_id, None)
        if number is not None:
            self.on_the_way.pop(number, None)
            self.refresh()

    def refresh(self) -> None:
        """Compute `view` and `has_room` again after a change."""
        load, num_own = self.load, len(self.dispatched)
        num_reported_own = load.router_calls.get(self.router_id, _NO_CALLS).num_open
        num_sequences = max(0, load.num_calls - num_reported_own) + num_own
        self.view = WorkerView(
            worker_id=self.worker_id,
            num_sequences=num_sequences,
            num_dispatched=num_own,
            cost=load.step_cost,
            step_limit_s=load.step_limit_s,
            max_step_tokens=load.max_step_tokens,
            num_decoding=load.num_decoding + self.num_routers * sum(w.num_tokens > 0 for w in self.on_the_way.values()),
            decode_context=load.decode_context + self.num_routers * sum(w.num_tokens for w in self.on_the_way.values()),
            backlog=self._backlog(),
            num_free_blocks=self._num_free_blocks(),
            blocks_released_per_s=self.blocks_released_per_s,
            block_bytes=self.agent.layout.block_bytes,
            agent_name=self.agent.name,
            paths=self.paths,
        )
        self.has_room = load.state is WorkerState.SERVING and not self.suspect and num_sequences < self.max_in_flight

    def _backlog(self) -> tuple[float, ...]:
        """Seconds of prompt work by size class: as reported, and that of calls on the way."""
        works = [work.prompt_s for work in self.on_the_way.values() if work.prompt_s > 0.0]
        if not works:
            return self.load.prompt_backlog
        backlog = list(self.load.prompt_backlog)
        for work_s in works:
            place = size_class(work_s)
            backlog += [0.0] * (place + 1 - len(backlog))
            backlog[place] += self.num_routers * work_s
        return tuple(backlog)

    def _num_free_blocks(self) -> int:
        ledger = self.load.ledger
        free = ledger.get(Column.FREE, 0) + ledger.get(Column.CACHED, 0) - self.load.num_promised_blocks
        return free - self.num_routers * sum(work.num_blocks for work in self.on_the_way.values())

    def check(self) -> None:
        before, had_room = self.view, self.has_room
        self.refresh()
        assert (self.view, self.has_room) == (before, had_room)
        assert set(self.on_the_way) <= set(self.dispatched.values())
        assert list(self.on_the_way) == sorted(self.on_the_way)
