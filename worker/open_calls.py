"""The open calls of a worker: their deadlines, stages and records, and their numbers by router for the load report."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.deadlines import Deadlines
from core.lifecycle import Stage, Timeline
from core.scheduling.worker_load import CallId, RouterCalls
from worker.call_record import CallRecord, StepCounts


@dataclass(slots=True)
class OpenCalls:
    """Each mapping has one entry for each open call, by request id."""

    deadlines: Deadlines[str] = field(default_factory=Deadlines)
    timelines: dict[str, Timeline] = field(default_factory=dict)
    records: dict[str, CallRecord] = field(default_factory=dict)
    calls: dict[str, CallId] = field(default_factory=dict)
    router_calls: dict[str, RouterCalls] = field(default_factory=dict)  # by router id; only routers with open calls
    counts: StepCounts = field(default_factory=StepCounts)  # of the worker

    def __len__(self) -> int:
        return len(self.calls)

    def open(self, request_id: str, call: CallId, deadline: float, record: CallRecord, now: float) -> None:
        """A call arrives, and waits in QUEUE."""
        self.timelines[request_id] = Timeline(Stage.QUEUE, now)
        self.records[request_id] = record
        self.deadlines.set(request_id, deadline)
        last_call, num_open = self.router_calls.get(call.router_id, RouterCalls())
        self.calls[request_id] = call
        self.router_calls[call.router_id] = RouterCalls(max(last_call, call.number), num_open + 1)

    def close(self, request_id: str) -> None:
        """The call has ended."""
        self.timelines.pop(request_id, None)
        self.records.pop(request_id, None)
        self.deadlines.cancel(request_id)
        call = self.calls.pop(request_id, None)
        if call is not None:
            last_call, num_open = self.router_calls.pop(call.router_id)
            if num_open > 1:
                self.router_calls[call.router_id] = RouterCalls(last_call, num_open - 1)

    def enter(self, request_id: str, stage: Stage, now: float) -> None:
        """A sequence enters its next stage."""
        self.timelines[request_id].enter(stage, now)
        self.records[request_id].mark(stage, self.counts)

    def check(self) -> None:
        assert len(self.deadlines) == len(self.timelines)
        assert self.timelines.keys() == self.records.keys() == self.calls.keys()
        assert sum(calls.num_open for calls in self.router_calls.values()) == len(self.calls)
