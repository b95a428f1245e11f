"""One worker, as the router sees it: its newest report, reconciled with the calls of this router.

A report counts the calls of all routers that had arrived when its load was taken. Calls of this router with a higher
number are on the way; the router adds them. So the view is the report plus what the report cannot have yet, and several
routers see the same truth:

    queued tokens = as reported + the tokens of calls on the way x the routers with open calls
    sequences     = as reported - those of this router + the open calls of this router, which it knows exactly

The calls of other routers on the way are unseen. The other routers see the same reports and choose alike, so each call
of this router on the way stands for one of every router. Otherwise all routers choose the same worker between two
reports.

A call that never arrives ends at this router, like every other call, and then counts no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.handoff import AgentAddress
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PathStatus
from core.worker_load import RouterCalls, WorkerLoad
from router.policy import WorkerView

_NO_CALLS = RouterCalls()


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
    on_the_way: dict[int, int] = field(default_factory=dict)  # calls that no report has yet -> tokens to compute
    view: WorkerView = field(init=False)
    has_room: bool = field(init=False)

    def __post_init__(self) -> None:
        self.refresh()

    def take_load(self, load: WorkerLoad) -> None:
        """The load of a report. The numbers of `on_the_way` rise, as does the highest call of each report."""
        self.load = load
        last_call = load.router_calls.get(self.router_id, _NO_CALLS).last_call
        while self.on_the_way and (first := next(iter(self.on_the_way))) <= last_call:
            del self.on_the_way[first]
        self.refresh()

    def add_call(self, dispatch_id: str, number: int, num_tokens: int) -> None:
        """A call that starts now and will compute `num_tokens` of its prompt on this worker."""
        self.dispatched[dispatch_id] = number
        self.on_the_way[number] = num_tokens
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
        num_queued_tokens = load.num_queued_tokens + self.num_routers * sum(self.on_the_way.values())
        self.view = WorkerView(self.worker_id, num_queued_tokens, num_sequences, num_own)
        self.has_room = load.state is WorkerState.SERVING and not self.suspect and num_sequences < self.max_in_flight

    def check(self) -> None:
        before, had_room = self.view, self.has_room
        self.refresh()
        assert (self.view, self.has_room) == (before, had_room)
        assert set(self.on_the_way) <= set(self.dispatched.values())
        assert list(self.on_the_way) == sorted(self.on_the_way)
