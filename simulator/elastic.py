"""A replay in which the pools change their sizes: FleetMachine starts, drains and switches workers in virtual time.

    routers --traffic, once a second--> Sizing --ScaleTo, SwitchRole--> FleetMachine --actions--> workers

`Sizing` is the planner of production, or one that a benchmark compares with it. A worker takes `start_s` to start. A
drained worker ends when it has moved or finished its sequences. A worker that switches its role loses its prefix cache
here, which it keeps in production.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

from core.config import ClusterConfig
from core.errors import InvalidRequest, TandemError
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole, Stage, Timeline
from core.machine import Tick
from core.request import Request
from core.traffic import RouterTraffic
from fleet.claims import Claims
from fleet.events import (
    ConfigureService,
    Drained,
    DrainService,
    FleetAction,
    FleetEvent,
    FleetMessage,
    FleetRules,
    KillService,
    MachineId,
    Member,
    PublishFleet,
    RoleSwitched,
    ScaleTo,
    ServiceConfigured,
    ServicePlaced,
    ServiceStarted,
    StartService,
    SwitchRole,
    SwitchService,
)
from fleet.machine import FleetMachine
from router.operations.traffic_count import TrafficCount
from router.requests import events
from simulator.links import BreakableLinks
from simulator.machine_timer import MachineTimer
from simulator.processes import CountEnded
from simulator.replay import START_S, Replay
from simulator.replay_config import ReplayConfig
from simulator.replay_result import ReplayResult
from simulator.router_shell import RouterShell
from simulator.served import ServedRequests
from simulator.worker_shell import WorkerShell
from simulator.workloads import Workload
from simulator.world import World

PLAN_INTERVAL_S = 1.0
POLL_S = 0.1  # of a draining worker
MAX_WORKERS = 64  # of a pool
DRAIN_LIMIT_S = 600.0
SWITCH_S = 0.1  # of a worker without work


class Sizing(Protocol):
    """Decides about the sizes. Every time is in virtual seconds."""

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None: ...

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]: ...


@dataclass(frozen=True, slots=True)
class SizeChange:
    at: float  # after the first arrival
    num_prefill: int  # wanted
    num_decode: int


@dataclass(frozen=True, slots=True)
class ElasticResult:
    replay: ReplayResult
    worker_hours: float  # from the decision to start a worker until it has left
    changes: tuple[SizeChange, ...]
    num_switches: int
    num_recomputed: int  # requests that a drain or a switch has made start anew
    notes: tuple[str, ...]  # of the planner

    @property
    def reversals_per_hour(self) -> float:
        """Changes of a pool against the direction of the one before."""
        reversals = 0
        for name in ("num_prefill", "num_decode"):
            sizes = [getattr(change, name) for change in self.changes]
            steps = [after - before for before, after in pairwise(sizes) if after != before]
            reversals += sum(one * two < 0 for one, two in pairwise(steps))
        return reversals / (self.replay.duration_s / 3600.0)


class CountedRequests(ServedRequests):
    """Counts as a router does in production."""

    def __init__(self, world: World, slo_ttft_s: float) -> None:
        super().__init__(world)
        self._slo_ttft_s = slo_ttft_s
        self.counts: defaultdict[str, TrafficCount] = defaultdict(TrafficCount)  # by router

    def expect(self, request: Request, router: str) -> None:
        super().expect(request, router)
        self.counts[router].arrived(1)

    def finished(self, request_id: str, outcome: events.Outcome) -> None:
        self._count(events.Finish(request_id, outcome))
        super().finished(request_id, outcome)

    def failed(self, request_id: str, error: TandemError) -> None:
        self._count(events.Fail(request_id, error, Timeline(Stage.FINISHED, self._open[request_id].arrived_at)))
        super().failed(request_id, error)

    def refused(self, request_id: str, error: TandemError) -> None:
        self.failed(request_id, error)

    def _count(self, end: events.Finish | events.Fail) -> None:
        self.counts[self._open[end.request_id].router].ended(end, self._slo_ttft_s)


class ElasticReplay(Replay):
    """`config.num_prefill` and `num_decode` are the first sizes."""

    clients: CountedRequests

    def __init__(self, workload: Workload, config: ReplayConfig, sizing: Sizing, start_s: float) -> None:
        super().__init__(workload, config)
        self._sizing, self._start_s = sizing, start_s
        cluster = ClusterConfig(
            num_routers=config.num_routers,
            num_prefill=config.num_prefill,
            num_decode=config.num_decode,
            max_workers=MAX_WORKERS,
            start_timeout_s=1e6,
        )
        self.fleet = FleetMachine(FleetRules(Claims(cluster), DRAIN_LIMIT_S, DRAIN_LIMIT_S))
        self._timer = MachineTimer(self.world, self.fleet, self._post)
        self._nodes: dict[Member, WorkerShell] = {}
        self._worker_s = 0.0  # of all workers so far
        self._changes: list[SizeChange] = []
        self._num_switches = 0
        self._notes: list[str] = []

    def _new_clients(self) -> CountedRequests:
        return CountedRequests(self.world, self.config.slo_ttft_s)

    def _first_workers(self) -> list[tuple[ServiceRole, int]]:
        return []  # the fleet starts them

    def _router(self, name: str) -> RouterShell:
        router = RouterShell(name, self.world, self.config.router, self.clients, self.config.new_policy)
        router.links = BreakableLinks(self.world, router, self.network, self.workers)
        return router

    def run_elastic(self, on_progress: CountEnded = lambda _: None) -> ElasticResult:
        """Raises as `run`."""
        self._post(Tick())
        self.world.at(START_S, self._plan)
        result = self.run(on_progress)
        num_recomputed = sum(record.path == "recomputed" for record in result.requests)
        return ElasticResult(
            result,
            self._worker_s / 3600.0,
            tuple(self._changes),
            self._num_switches,
            num_recomputed,
            tuple(self._notes),
        )

    # ---- sizes

    def _plan(self) -> None:
        if self._is_done():
            return
        now = self.world.now
        for router in self.routers:
            traffic = self.clients.counts[router.name].reading(router.machine.view, self.config.slo_ttft_s)
            self._sizing.note(router.name, traffic, now)
        status = self.fleet.status(now)
        self._worker_s += sum(slot.role is not ServiceRole.ROUTER for slot in status.slots) * PLAN_INTERVAL_S
        for action in self._sizing.plan(status, now):
            if isinstance(action, FleetMessage):
                self._notes.append(f"{now - START_S:.0f} s: {action.text}")
                continue
            try:
                self._post(action)
            except InvalidRequest as refused:
                self._notes.append(f"{now - START_S:.0f} s: refused: {refused}")
        self._note_sizes()
        self.world.after(PLAN_INTERVAL_S, self._plan)

    def _note_sizes(self) -> None:
        wanted = self.fleet.wanted
        change = SizeChange(self.world.now - START_S, wanted[ServiceRole.PREFILL], wanted[ServiceRole.DECODE])
        last = self._changes[-1] if self._changes else None
        if last is None or (last.num_prefill, last.num_decode) != (change.num_prefill, change.num_decode):
            self._changes.append(change)

    # ---- the shell of the fleet

    def _post(self, event: FleetEvent) -> None:
        for action in self.fleet.handle(event, self.world.now):
            self._perform(action)
        self._timer.update()

    def _later(self, event: FleetEvent, delay_s: float = 0.0) -> None:
        self.world.after(delay_s, partial(self._post, event))

    def _perform(self, action: FleetAction) -> None:
        match action:
            case StartService(member):
                self._later(ServicePlaced(member, MachineId(member.name, "")))
                is_first = self.world.now == 0.0 or member.role is ServiceRole.ROUTER
                self.world.after(0.0 if is_first else self._start_s, partial(self._serve, member))
            case ConfigureService(member, revision):
                self._later(ServiceConfigured(member, revision))
            case PublishFleet(_, workers, _):
                for router in self.routers:
                    for worker in workers:
                        if worker.draining:
                            router.post(events.WorkerLeaves(worker.service_id))
            case DrainService(member) | SwitchService(member):
                if member in self._nodes:
                    self._nodes[member].drain()
                self.world.after(POLL_S, partial(self._end_drained, member, isinstance(action, SwitchService)))
            case KillService(member):
                if member in self._nodes:
                    self._end(member, killed=True)

    def _serve(self, member: Member) -> None:
        if not self.fleet.has(member):
            return  # not wanted any more
        service_id = member.name if member.role is ServiceRole.ROUTER else f"{member.name}.{member.start:04x}"
        if member.role is not ServiceRole.ROUTER:
            self._nodes[member] = self._add_worker(service_id, member.role)
            for links in self._links:
                links.keep_connected(service_id)
        self._post(ServiceStarted(member, service_id, f"{service_id}:0"))

    def _end_drained(self, member: Member, is_switch: bool) -> None:
        node = self._nodes.get(member)
        if node is None:  # a router, or killed
            if member.role is ServiceRole.ROUTER:
                self._post(Drained(member))
            return
        if not node.machine.idle:
            self.world.after(POLL_S, partial(self._end_drained, member, is_switch))
            return
        self._end(member, killed=False)
        if not is_switch:
            self._post(Drained(member))
            return
        self._num_switches += 1
        self.world.after(SWITCH_S, partial(self._serve_switched, member, node.spec.worker_id))

    def _serve_switched(self, member: Member, worker_id: str) -> None:
        """The worker loses its prefix cache, which it keeps in production."""
        self._nodes[member] = self._add_worker(worker_id, member.role)
        self._post(RoleSwitched(member))

    def _end(self, member: Member, killed: bool) -> None:
        node = self._nodes.pop(member)
        node.die(silent=False, killed=killed)
        for links in self._links:
            links.notice_death(node)

    @property
    def _links(self) -> list[BreakableLinks]:
        return [router.links for router in self.routers if isinstance(router.links, BreakableLinks)]
