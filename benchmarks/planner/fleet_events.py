"""The time of an event of the fleet machine with many services: from the event to its actions and the next deadline."""

from __future__ import annotations

import time

from core.config import ClusterConfig
from core.machine import Tick
from fleet.claims import Claims
from fleet.events import (
    FleetAction,
    FleetEvent,
    FleetRules,
    MachineId,
    ServiceDied,
    ServicePlaced,
    ServiceStarted,
    StartService,
)
from fleet.machine import FleetMachine

PLACES_OF_A_MACHINE = 8
NUM_DEATHS = 200


def event_seconds(num_workers: int) -> list[float]:
    """Of every event while a fleet of two routers and so many workers of each role starts, and of some deaths."""
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
