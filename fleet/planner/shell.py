"""Asks the routers for their traffic once a second, and tells the planner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from core.fleet_control import FleetStatus
from fleet.events import FleetMessage
from fleet.host import Host, HostDied
from fleet.planner.planner import PlanAction, Planner

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 0.5  # of a router; its next answer has what this one had


async def run_planner(
    planner: Planner,
    routers: Callable[[], Mapping[str, Host]],
    status: Callable[[], FleetStatus],
    now: Callable[[], float],
    perform: Callable[[PlanAction], None],
) -> None:
    """Run until cancelled. `routers` are the hosts of those that serve, by service id.

    A planner with a bug stops and says so: the fleet serves on with the sizes that it has.
    """

    async def ask(router_id: str, host: Host) -> None:
        with contextlib.suppress(HostDied, TimeoutError):
            traffic = await asyncio.wait_for(host.traffic(planner.start_s), ANSWER_TIMEOUT_S)
            planner.note(router_id, traffic, now())

    while True:
        await asyncio.sleep(INTERVAL_S)
        await asyncio.gather(*(ask(router_id, host) for router_id, host in routers().items()))
        try:
            actions = planner.plan(status(), now())
        except Exception as error:
            logger.exception("the planner has a bug")
            perform(FleetMessage("planner", "has a bug and stops; the sizes stay", f"{type(error).__name__}: {error}"))
            return
        for action in actions:
            perform(action)
