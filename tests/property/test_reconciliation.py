"""Two routers and a worker: each router's view of the worker is the worker's truth, whatever is on the way.

Calls, ends and reports travel in order and with any delay, and calls may be lost with their connection. The worker is
the production machine. When nothing is on the way, both views equal the load of the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import TandemError
from core.lifecycle import ServiceRole, WorkerState
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import CallId, WorkerLoad
from decode_worker.events import DecodeArrived, DecodeCancelled, DecodeDone, DecodeFailed
from router.routing.worker_record import CallWork, WorkerRecord
from tests.support.driven_worker import DrivenWorker, request

ROUTERS = st.sampled_from(("a", "b"))
COUNTS = st.integers(1, 3)
MAX_IN_FLIGHT = 6


@dataclass
class Router:
    record: WorkerRecord
    num_calls: int = 0
    calls: deque[DecodeArrived] = field(default_factory=deque)  # on the way to the worker
    ends: deque[str] = field(default_factory=deque)  # on the way back, by dispatch id
    reports: deque[tuple[WorkerLoad, int]] = field(default_factory=deque)  # with the last call that had arrived
    last_arrived: int = 0
    heard: WorkerLoad = field(default_factory=lambda: WorkerLoad(WorkerState.SERVING))
    works: dict[int, CallWork] = field(default_factory=dict)  # of each call that was ever started

    @property
    def num_others(self) -> int:
        """Calls of the other router in the last report."""
        return sum(calls.num_open for name, calls in self.heard.router_calls.items() if name != self.record.router_id)

    def work_of(self, numbers: Iterable[int]) -> tuple[float, int]:
        """Seconds and blocks of these calls."""
        works = [self.works[number] for number in numbers]
        return sum(work.prompt_s for work in works), sum(work.num_blocks for work in works)


def brought(record: WorkerRecord) -> tuple[float, int]:
    """Seconds of prompt work and blocks that the view adds to the report."""
    ledger = record.load.ledger
    reported = ledger.get(Column.FREE, 0) + ledger.get(Column.CACHED, 0) - record.load.num_promised_blocks
    return sum(record.view.arriving), reported - record.view.num_free_blocks


class TwoRouters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.worker = DrivenWorker()
        self.worker.begin(is_prefill=False, blocks=40, max_batched_tokens=4, max_running=3, max_waiting=4)
        load = WorkerLoad(WorkerState.SERVING)
        self.routers = {
            name: Router(WorkerRecord("w", ServiceRole.DECODE, self.worker.me, load, 0.0, name, MAX_IN_FLIGHT))
            for name in ("a", "b")
        }

    def post(self, event: object) -> None:
        self.note_ends(self.worker.post(event))

    def note_ends(self, actions: Iterable[object]) -> None:
        for action in actions:
            if isinstance(action, DecodeDone | DecodeFailed):
                self.routers[action.request_id[0]].ends.append(action.request_id)

    # ---- the routers

    @rule(name=ROUTERS, sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3), max_tokens=st.integers(1, 4))
    def start_calls(self, name: str, sizes: list[int], max_tokens: int) -> None:
        router = self.routers[name]
        for num_tokens in sizes:
            if not router.record.has_room:
                return
            router.num_calls += 1
            dispatch_id = f"{name}{router.num_calls}"
            work = router.works[router.num_calls] = CallWork(num_tokens / 1024, -(-num_tokens // 4))
            router.record.add_call(dispatch_id, router.num_calls, work)
            arriving = request(dispatch_id, num_tokens, max_tokens)
            router.calls.append(DecodeArrived(arriving, None, 1e9, CallId(name, router.num_calls)))

    @rule(name=ROUTERS)
    def lose_the_calls_on_the_way(self, name: str) -> None:
        """The connection breaks: the calls end at the router, and never arrive."""
        router = self.routers[name]
        while router.calls:
            router.record.remove_call(router.calls.popleft().request.request_id)

    @rule(name=ROUTERS, data=st.data())
    def cancel_a_call(self, name: str, data: st.DataObject) -> None:
        """One that has arrived. The worker learns of it at once."""
        router = self.routers[name]
        on_the_way = {arrived.request.request_id for arrived in router.calls}
        arrived = [dispatch_id for dispatch_id in router.record.dispatched if dispatch_id not in on_the_way]
        if arrived:
            dispatch_id = data.draw(st.sampled_from(arrived))
            router.record.remove_call(dispatch_id)
            self.post(DecodeCancelled(dispatch_id))

    @rule(name=ROUTERS)
    def hear_of_an_end(self, name: str) -> None:
        router = self.routers[name]
        if router.ends:
            router.record.remove_call(router.ends.popleft())

    @rule(name=ROUTERS, count=COUNTS)
    def hear_reports(self, name: str, count: int) -> None:
        for _ in range(count):
            self.hear_a_report(name)

    def hear_a_report(self, name: str) -> None:
        router = self.routers[name]
        if not router.reports:
            return
        router.heard, last_arrived = router.reports.popleft()
        router.record.take_load(router.heard)
        on_the_way = router.work_of(number for number in router.record.dispatched.values() if number > last_arrived)
        if name in router.heard.router_calls:
            assert brought(router.record) == on_the_way
        else:  # calls that have arrived and ended count until the router hears of their ends
            assert brought(router.record) >= on_the_way

    # ---- the worker

    @rule(name=ROUTERS, count=COUNTS)
    def calls_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            self.a_call_arrives(name)

    def a_call_arrives(self, name: str) -> None:
        router = self.routers[name]
        if not router.calls:
            return
        arrived = router.calls.popleft()
        router.last_arrived = arrived.call.number
        try:
            self.post(arrived)
        except TandemError:  # its queue is full
            router.ends.append(arrived.request.request_id)

    @precondition(lambda self: bool(self.worker.plans))
    @rule()
    def finish_a_step(self) -> None:
        self.note_ends(self.worker.step())

    @rule()
    def report(self) -> None:
        load = self.worker.machine.load()
        for router in self.routers.values():
            router.reports.append((load, router.last_arrived))

    # ---- laws

    @invariant()
    def a_view_has_the_calls_of_its_router_and_those_that_others_had_at_the_last_report(self) -> None:
        for router in self.routers.values():
            router.record.check()
            assert router.record.view.num_sequences == router.num_others + len(router.record.dispatched)
            prompt_s, num_blocks = router.work_of(arrived.call.number for arrived in router.calls)
            assert brought(router.record)[0] >= prompt_s
            assert brought(router.record)[1] >= num_blocks

    @rule()
    def let_everything_arrive(self) -> None:
        """The worker may still be busy."""
        for name, router in self.routers.items():
            while router.calls:
                self.a_call_arrives(name)
        self.report()
        for name, router in self.routers.items():
            while router.reports:
                self.hear_a_report(name)
            while router.ends:
                self.hear_of_an_end(name)
        load = self.worker.machine.load()
        for router in self.routers.values():
            view = router.record.view
            assert (brought(router.record), view.num_sequences) == ((0.0, 0), load.num_calls)
            assert (view.backlog, view.num_decoding) == (load.prompt_backlog, load.num_decoding)
            assert router.record.has_room == (load.num_calls < MAX_IN_FLIGHT)
        assert load.num_calls == sum(len(router.record.dispatched) for router in self.routers.values())


TestTwoRouters = TwoRouters.TestCase
TestTwoRouters.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
