"""Pools that change their sizes in virtual time: a `Sizing` decides, FleetMachine starts, drains and switches workers.

    Workers --traffic, once a second--> Sizing --ScaleTo, SwitchRole--> FleetMachine --actions--> Workers

`Sizing` is the planner of production, or one that a benchmark compares with it. A worker takes `start_s` to start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole
from core.machine import Tick
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
from simulator.machine_timer import MachineTimer
from simulator.world import World

PLAN_INTERVAL_S = 1.0
POLL_S = 0.1  # of a draining worker
DRAIN_LIMIT_S = 600.0
SWITCH_S = 0.1  # of a worker without work


class Sizing(Protocol):
    """Decides about the sizes. Every time is in virtual seconds."""

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None: ...

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]: ...


class Workers(Protocol):
    """The workers of a fleet, by their service ids, and the reports of their routers."""

    def readings(self) -> Iterable[tuple[str, RouterTraffic]]: ...

    def start_worker(self, worker_id: str, role: ServiceRole) -> None: ...

    def drain_worker(self, worker_id: str) -> None: ...

    def is_idle(self, worker_id: str) -> bool: ...

    def end_worker(self, worker_id: str, killed: bool) -> None: ...

    def announce_leaving(self, worker_ids: Iterable[str]) -> None:
        """Tell the routers that these workers drain."""


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


class ElasticFleet:
    """The shell of a FleetMachine. Call `start` before the first event of the world."""

    def __init__(
        self, world: World, cluster: ClusterConfig, sizing: Sizing, start_s: float, workers: Workers, begins_at: float
    ) -> None:
        """The first plan is at `begins_at`."""
        self.machine = FleetMachine(FleetRules(Claims(cluster), DRAIN_LIMIT_S, DRAIN_LIMIT_S))
        self.worker_s = 0.0  # of all workers so far, from the decision to start one until it has left
        self.changes: list[SizeChange] = []
        self.num_switches = 0
        self.notes: list[str] = []  # of the planner
        self._world, self._sizing, self._start_s, self._workers = world, sizing, start_s, workers
        self._begins_at = begins_at
        self._timer = MachineTimer(world, self.machine, self.post)
        self._ids: dict[Member, str] = {}  # of workers that serve, drain or switch

    def start(self, is_done: Callable[[], bool]) -> None:
        """Start the first workers, and plan until `is_done`."""
        self.post(Tick())
        self._world.at(self._begins_at, partial(self._plan, is_done))

    # ---- sizes

    def _plan(self, is_done: Callable[[], bool]) -> None:
        if is_done():
            return
        now = self._world.now
        for router_id, traffic in self._workers.readings():
            self._sizing.note(router_id, traffic, now)
        status = self.machine.status(now)
        self.worker_s += sum(slot.role is not ServiceRole.ROUTER for slot in status.slots) * PLAN_INTERVAL_S
        at_s = now - self._begins_at
        for action in self._sizing.plan(status, now):
            if isinstance(action, FleetMessage):
                self.notes.append(f"{at_s:.0f} s: {action.text}")
                continue
            try:
                self.post(action)
            except InvalidRequest as refused:
                self.notes.append(f"{at_s:.0f} s: refused: {refused}")
        self._note_sizes(at_s)
        self._world.after(PLAN_INTERVAL_S, partial(self._plan, is_done))

    def _note_sizes(self, at_s: float) -> None:
        wanted = self.machine.wanted
        change = SizeChange(at_s, wanted[ServiceRole.PREFILL], wanted[ServiceRole.DECODE])
        last = self.changes[-1] if self.changes else None
        if last is None or (last.num_prefill, last.num_decode) != (change.num_prefill, change.num_decode):
            self.changes.append(change)

    # ---- the shell of the machine

    def post(self, event: FleetEvent) -> None:
        for action in self.machine.handle(event, self._world.now):
            self._perform(action)
        self._timer.update()

    def _later(self, event: FleetEvent, delay_s: float = 0.0) -> None:
        self._world.after(delay_s, partial(self.post, event))

    def _perform(self, action: FleetAction) -> None:
        match action:
            case StartService(member):
                self._later(ServicePlaced(member, MachineId(member.name, "")))
                is_first = self._world.now == 0.0 or member.role is ServiceRole.ROUTER
                self._world.after(0.0 if is_first else self._start_s, partial(self._serve, member))
            case ConfigureService(member, revision):
                self._later(ServiceConfigured(member, revision))
            case PublishFleet(_, workers, _):
                self._workers.announce_leaving(worker.service_id for worker in workers if worker.draining)
            case DrainService(member) | SwitchService(member):
                if member in self._ids:
                    self._workers.drain_worker(self._ids[member])
                self._world.after(POLL_S, partial(self._end_drained, member, isinstance(action, SwitchService)))
            case KillService(member):
                if member in self._ids:
                    self._workers.end_worker(self._ids.pop(member), killed=True)

    def _serve(self, member: Member) -> None:
        if not self.machine.has(member):
            return  # not wanted any more
        service_id = member.name if member.role is ServiceRole.ROUTER else f"{member.name}.{member.start:04x}"
        if member.role is not ServiceRole.ROUTER:
            self._ids[member] = service_id
            self._workers.start_worker(service_id, member.role)
        self.post(ServiceStarted(member, service_id, f"{service_id}:0"))

    def _end_drained(self, member: Member, is_switch: bool) -> None:
        worker_id = self._ids.get(member)
        if worker_id is None:  # a router, or killed
            if member.role is ServiceRole.ROUTER:
                self.post(Drained(member))
            return
        if not self._workers.is_idle(worker_id):
            self._world.after(POLL_S, partial(self._end_drained, member, is_switch))
            return
        self._workers.end_worker(self._ids.pop(member), killed=False)
        if not is_switch:
            self.post(Drained(member))
            return
        self.num_switches += 1
        self._world.after(SWITCH_S, partial(self._serve_switched, member, worker_id))

    def _serve_switched(self, member: Member, worker_id: str) -> None:
        """The worker loses its prefix cache, which it keeps in production."""
        self._ids[member] = worker_id
        self._workers.start_worker(worker_id, member.role)
        self.post(RoleSwitched(member))
