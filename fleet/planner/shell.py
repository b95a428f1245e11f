"""Asks the routers for their traffic once a second, and tells the planner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from core.fleet_control import FleetStatus
from fleet.host import Host, HostDied
from fleet.planner.planner import PlanAction, Planner

INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 0.5  # of a router; its next answer has what this one had


async def run_planner(
    planner: Planner,
    routers: Callable[[], Mapping[str, Host]],
    status: Callable[[], FleetStatus],
    now: Callable[[], float],
    perform: Callable[[PlanAction], None],
) -> None:
    """Run until cancelled. `routers` are the hosts of those that serve, by service id."""

    async def ask(router_id: str, host: Host) -> None:
        with contextlib.suppress(HostDied, TimeoutError):
            traffic = await asyncio.wait_for(host.traffic(planner.start_s), ANSWER_TIMEOUT_S)
            planner.note(router_id, traffic, now())

    while True:
        await asyncio.sleep(INTERVAL_S)
        await asyncio.gather(*(ask(router_id, host) for router_id, host in routers().items()))
        for action in planner.plan(status(), now()):
            perform(action)
