"""A replay in which the pools change their sizes, with the machines of production.

    ElasticReplay --traffic, once a second--> Sizing --ScaleTo, SwitchRole--> FleetShell --> ElasticReplay

`Sizing` is the planner of production, or one that a benchmark compares with it. A worker takes `start_s` to start, and
a drained worker ends when it has moved or finished its sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from core.config import ClusterConfig
from core.errors import InvalidRequest, TandemError
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole, Stage, Timeline
from core.request import Request
from core.service import Endpoint
from core.traffic import RouterTraffic
from fleet.law.claims import Claims
from fleet.law.events import FleetMessage, FleetRules, Member, ScaleTo, SwitchRole
from router.operations.traffic_count import TrafficCount
from router.requests import events
from simulator.processes import CountEnded
from simulator.replay.replay import START_S, Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import ReplayResult
from simulator.replay.served import ServedRequests
from simulator.replay.workloads import Workload
from simulator.shells.fleet_shell import FleetShell
from simulator.shells.links import BreakableLinks
from simulator.shells.router_shell import RouterShell
from simulator.virtual.world import World

MAX_WORKERS = 64  # of a pool
PLAN_INTERVAL_S = 1.0
DRAIN_LIMIT_S = 600.0


class Sizing(Protocol):
    """Decides about the sizes. Every time is in virtual seconds."""

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None: ...

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]: ...


@dataclass(frozen=True, slots=True)
class SizeChange:
    at: float  # after the first arrival
    num_prefill: int  # wanted
    num_decode: int


def num_reversals(changes: Iterable[SizeChange]) -> int:
    """Changes of a pool against the direction of the one before."""
    reversals, changes = 0, list(changes)
    for name in ("num_prefill", "num_decode"):
        sizes = [getattr(change, name) for change in changes]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        reversals += sum(one * two < 0 for one, two in pairwise(steps))
    return reversals


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
        return num_reversals(self.changes) / (self.replay.duration_s / 3600.0)


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
        cluster = ClusterConfig(
            num_routers=config.num_routers,
            num_prefill=config.num_prefill,
            num_decode=config.num_decode,
            max_workers=MAX_WORKERS,
            start_timeout_s=1e6,
        )
        self._sizing, self._start_s = sizing, start_s
        self._shell = FleetShell(
            self.world, FleetRules(Claims(cluster), DRAIN_LIMIT_S, DRAIN_LIMIT_S), self, self._start_time
        )
        self._worker_s = 0.0  # of all workers so far, from the decision to start one until it has left
        self._changes: list[SizeChange] = []
        self._notes: list[str] = []  # of the planner

    def _new_clients(self) -> CountedRequests:
        return CountedRequests(self.world, self.config.slo_ttft_s)

    def _first_workers(self) -> list[tuple[ServiceRole, int]]:
        return []  # the fleet starts them

    def _start_time(self, member: Member) -> float:
        is_first = self.world.now == 0.0 or member.role is ServiceRole.ROUTER
        return 0.0 if is_first else self._start_s

    def _router(self, name: str) -> RouterShell:
        router = RouterShell(name, self.world, self.config.router, self.clients, self.config.new_policy)
        router.links = BreakableLinks(self.world, router, self.network, self.workers)
        return router

    def run_elastic(self, on_progress: CountEnded = lambda _: None) -> ElasticResult:
        """Raises as `run`."""
        self._shell.start()
        self.world.at(START_S, self._plan)
        result = self.run(on_progress)
        return ElasticResult(
            result,
            self._worker_s / 3600.0,
            tuple(self._changes),
            self._shell.num_switches,
            sum(record.path == "recomputed" for record in result.requests),
            tuple(self._notes),
        )

    def _plan(self) -> None:
        """Once a second, from the first request on."""
        if self._is_done():
            return
        now = self.world.now
        for router in self.routers:
            traffic = self.clients.counts[router.name].reading(router.machine.view, self.config.slo_ttft_s)
            self._sizing.note(router.name, traffic, now)
        status = self._shell.machine.status(now)
        self._worker_s += sum(slot.role is not ServiceRole.ROUTER for slot in status.slots) * PLAN_INTERVAL_S
        at_s = now - START_S
        for action in self._sizing.plan(status, now):
            if isinstance(action, FleetMessage):
                self._notes.append(f"{at_s:.0f} s: {action.text}")
                continue
            try:
                self._shell.post(action)
            except InvalidRequest as refused:
                self._notes.append(f"{at_s:.0f} s: refused: {refused}")
        wanted = self._shell.machine.wanted
        sizes = wanted[ServiceRole.PREFILL], wanted[ServiceRole.DECODE]
        if not self._changes or (self._changes[-1].num_prefill, self._changes[-1].num_decode) != sizes:
            self._changes.append(SizeChange(at_s, *sizes))
        self.world.after(PLAN_INTERVAL_S, self._plan)

    # ---- the workers of the fleet

    def start_service(self, service_id: str, member: Member) -> None:
        self._add_worker(service_id, member.role)

    def drain_service(self, service_id: str) -> None:
        self.workers[service_id].drain()

    def is_idle(self, service_id: str) -> bool:
        return self.workers[service_id].is_idle

    def switch_service(self, service_id: str) -> None:
        self.workers[service_id].switch_role()

    def end_service(self, service_id: str, killed: bool) -> None:
        worker = self.workers[service_id]
        worker.die(silent=False, killed=killed)
        for router in self.routers:
            _links_of(router).notice_death(worker)

    def publish(self, router: Member, workers: Sequence[Endpoint]) -> None:
        _links_of(self.routers[router.ordinal]).set_workers(workers)


def _links_of(router: RouterShell) -> BreakableLinks:
    assert isinstance(router.links, BreakableLinks)
    return router.links
