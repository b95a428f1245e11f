"""The times of the planner and of the fleet machine with many services, without any worker behind them."""

from __future__ import annotations

import math
import time

from core.config import ClusterConfig, PlannerConfig
from core.cost.step_cost import StepCost
from core.fleet_control import FleetStatus, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from fleet.law.claims import Claims
from fleet.law.events import (
    FleetAction,
    FleetEvent,
    FleetRules,
    MachineId,
    ScaleTo,
    ServiceDied,
    ServicePlaced,
    ServiceStarted,
    StartService,
    SwitchRole,
)
from fleet.law.machine import FleetMachine
from fleet.planner.planner import Planner

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
COST = StepCost(0.006, 0.0, 5e-8, 2e-5, 5e-10)  # about an H100 with 8 B
PROMPT_TOKENS, OUTPUT_TOKENS = 8000, 300
PLACES_OF_A_MACHINE = 8
NUM_DEATHS = 200


def event_seconds(num_workers: int) -> list[float]:
    """Of every event while a fleet of two routers and so many workers of each role starts, and of some deaths.

    From the event to its actions and the next deadline.
    """
    config = ClusterConfig(max_workers=num_workers, num_prefill=num_workers, num_decode=num_workers, num_routers=2)
    machine = FleetMachine(FleetRules(Claims(config), drain_timeout_s=30.0, router_drain_timeout_s=10.0))
    seconds: list[float] = []
    now = 0.0

    def post(event: FleetEvent) -> list[FleetAction]:
        nonlocal now
        now += 0.001
        started = time.perf_counter()
        actions = machine.handle(event, now)
        machine.next_deadline()
        seconds.append(time.perf_counter() - started)
        return actions

    members = [action.member for action in post(Tick()) if isinstance(action, StartService)]
    seconds.clear()  # the first event starts the whole fleet
    for number, member in enumerate(members):
        name = f"machine-{number // PLACES_OF_A_MACHINE}"
        post(ServicePlaced(member, MachineId(name, name)))
    for member in members:
        post(ServiceStarted(member, f"{member.name}-{member.start:x}", f"10.0.0.1:{member.start}"))
    for member in members[:NUM_DEATHS]:
        post(ServiceDied(member, "killed"))
    return seconds


def plan_seconds(num_workers: int, rate: float, duration_s: int) -> tuple[list[float], int]:
    """Of each plan of `duration_s`, once a second, and the largest size of the prefill pool.

    The requests per second rise from a tenth of `rate` to it and fall again. The fleet takes each order at once.
    """
    planner = Planner(PlannerConfig(enabled=True, max_prefill=num_workers, max_decode=num_workers, start_s=30.0))
    sizes = {P: num_workers // 2, D: num_workers // 2}
    totals, seconds, largest = RequestTotals(), [], 0
    for second in range(duration_s):
        share = 0.55 - 0.45 * math.cos(2.0 * math.pi * second / duration_s)
        totals = totals.plus(_requests(round(rate * share)))
        planner.note("router-0", RouterTraffic(totals, 0, 0, 2.0, _workers(sizes)), float(second))
        status = _status(sizes)
        began = time.process_time()
        actions = planner.plan(status, float(second))
        seconds.append(time.process_time() - began)
        for action in actions:
            if isinstance(action, ScaleTo):
                sizes |= action.sizes
            elif isinstance(action, SwitchRole):
                other = P if action.role is D else D
                sizes |= {action.role: sizes[action.role] + 1, other: sizes[other] - 1}
        largest = max(largest, sizes[P])
    return seconds, largest


def _requests(count: int) -> RequestTotals:
    """The totals of requests that arrive and end in one second."""
    return RequestTotals(
        count, count, count, count, PROMPT_TOKENS * count, PROMPT_TOKENS * count,
        float(PROMPT_TOKENS) ** 2 * count, OUTPUT_TOKENS * count, 0.3 * count,
    )  # fmt: skip


def _workers(sizes: dict[ServiceRole, int]) -> tuple[WorkerTraffic, ...]:
    return tuple(
        WorkerTraffic(f"{role.value}-{number}", role, COST, 0.05, 8192, 400_000, held_tokens=0)
        for role in (P, D)
        for number in range(sizes[role])
    )


def _status(sizes: dict[ServiceRole, int]) -> FleetStatus:
    names = [(f"{role.value}-{number}", role) for role in (P, D) for number in range(sizes[role])]
    slots = [
        SlotStatus(name, role, SlotState.SERVING, 1000.0, service_id=name, machine=f"machine of {name}")
        for name, role in [*names, ("router-0", ServiceRole.ROUTER)]
    ]
    return FleetStatus(sizes | {ServiceRole.ROUTER: 1}, tuple(slots))
