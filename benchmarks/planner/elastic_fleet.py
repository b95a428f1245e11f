"""Pools that change their sizes in virtual time: a `Sizing` decides, a fleet follows (simulator/shells/fleet_shell.py).

    PlannedWorkers --traffic, once a second--> Sizing --ScaleTo, SwitchRole--> FleetShell --> PlannedWorkers

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
from core.traffic import RouterTraffic
from fleet.law.claims import Claims
from fleet.law.events import FleetMessage, FleetRules, Member, ScaleTo, SwitchRole
from simulator.shells.fleet_shell import FleetShell, Workers
from simulator.virtual.world import World

PLAN_INTERVAL_S = 1.0
DRAIN_LIMIT_S = 600.0


class Sizing(Protocol):
    """Decides about the sizes. Every time is in virtual seconds."""

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None: ...

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]: ...


class PlannedWorkers(Workers, Protocol):
    def readings(self) -> Iterable[tuple[str, RouterTraffic]]:
        """The reports of the routers."""


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
    """Call `start` before the first event of the world."""

    def __init__(
        self,
        world: World,
        cluster: ClusterConfig,
        sizing: Sizing,
        start_s: float,
        workers: PlannedWorkers,
        begins_at: float,
    ) -> None:
        """The first plan is at `begins_at`."""
        rules = FleetRules(Claims(cluster), DRAIN_LIMIT_S, DRAIN_LIMIT_S)
        self.shell = FleetShell(world, rules, workers, self._start_time)
        self.worker_s = 0.0  # of all workers so far, from the decision to start one until it has left
        self.changes: list[SizeChange] = []
        self.notes: list[str] = []  # of the planner
        self._world, self._sizing, self._start_s, self._workers = world, sizing, start_s, workers
        self._begins_at = begins_at

    def _start_time(self, member: Member) -> float:
        is_first = self._world.now == 0.0 or member.role is ServiceRole.ROUTER
        return 0.0 if is_first else self._start_s

    def start(self, is_done: Callable[[], bool]) -> None:
        """Start the first workers, and plan until `is_done`."""
        self.shell.start()
        self._world.at(self._begins_at, partial(self._plan, is_done))

    # ---- sizes

    def _plan(self, is_done: Callable[[], bool]) -> None:
        if is_done():
            return
        now = self._world.now
        for router_id, traffic in self._workers.readings():
            self._sizing.note(router_id, traffic, now)
        status = self.shell.machine.status(now)
        self.worker_s += sum(slot.role is not ServiceRole.ROUTER for slot in status.slots) * PLAN_INTERVAL_S
        at_s = now - self._begins_at
        for action in self._sizing.plan(status, now):
            if isinstance(action, FleetMessage):
                self.notes.append(f"{at_s:.0f} s: {action.text}")
                continue
            try:
                self.shell.post(action)
            except InvalidRequest as refused:
                self.notes.append(f"{at_s:.0f} s: refused: {refused}")
        self._note_sizes(at_s)
        self._world.after(PLAN_INTERVAL_S, partial(self._plan, is_done))

    def _note_sizes(self, at_s: float) -> None:
        wanted = self.shell.machine.wanted
        change = SizeChange(at_s, wanted[ServiceRole.PREFILL], wanted[ServiceRole.DECODE])
        last = self.changes[-1] if self.changes else None
        if last is None or (last.num_prefill, last.num_decode) != (change.num_prefill, change.num_decode):
            self.changes.append(change)
