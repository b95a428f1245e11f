"""Asks the routers for their traffic once a second, and tells the planner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from core.errors import InvalidRequest, WorkerUnavailable
from core.fleet_control import FleetStatus
from fleet.host.host import Host, HostDied
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner.planner import Planner

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 0.5  # then the plan goes without this router, whose answer may still come


async def run_planner(
    planner: Planner,
    routers: Callable[[], Mapping[str, Host]],
    status: Callable[[], FleetStatus],
    now: Callable[[], float],
    ask_fleet: Callable[[ScaleTo | SwitchRole], None],
    tell: Callable[[FleetMessage], None],
) -> None:
    """Run until cancelled. `routers` are the hosts of those that serve or drain, by service id. `ask_fleet` may raise
    `InvalidRequest` and `WorkerUnavailable`.

    A planner with a bug stops and says so: the fleet serves on with the sizes that it has.
    """
    asking: dict[str, asyncio.Task[None]] = {}  # at most one call to each router

    async def ask(router_id: str, host: Host) -> None:
        with contextlib.suppress(HostDied):
            traffic = await host.traffic(planner.start_s)
            planner.note(router_id, traffic, now())

    async def plan_once() -> None:
        for router_id, host in routers().items():
            if router_id not in asking:
                asking[router_id] = asyncio.create_task(ask(router_id, host))
        if asking:
            await asyncio.wait(asking.values(), timeout=ANSWER_TIMEOUT_S)
        for router_id in [router_id for router_id, task in asking.items() if task.done()]:
            asking.pop(router_id).result()
        for action in planner.plan(status(), now()):
            if isinstance(action, FleetMessage):
                tell(action)
                continue
            try:
                ask_fleet(action)
            except (InvalidRequest, WorkerUnavailable) as refused:  # the fleet has changed, or has failed
                tell(FleetMessage("planner", "could not have its sizes", str(refused), printed=False))

    try:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await plan_once()
    except Exception as error:
        logger.exception("the planner has a bug")
        tell(FleetMessage("planner", "has a bug and stops; the sizes stay", f"{type(error).__name__}: {error}"))
    finally:
        for task in asking.values():
            task.cancel()
