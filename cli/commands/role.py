"""`tandem role`: moves a worker to the other pool, and waits until it serves there."""

from __future__ import annotations

import asyncio

from rich.console import Console

from cli.commands.fleet_polls import FleetPolls
from cli.screens.fleet_health import state_name
from cli.screens.pool_lines import sizes_text
from core.errors import WorkerUnavailable
from core.lifecycle import ServiceRole
from protos.fleet_codec import SERVICE_ROLES
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2

REFRESH_S = 0.1


async def switch_role(connection: AsyncClient, slot: str, role: str, console: Console) -> None:
    """Raises `WorkerUnavailable` if the worker does not serve in the role. Ctrl-C ends only the wait."""
    wanted_role = SERVICE_ROLES[ServiceRole(role)]
    async with connection as client:
        answer = await client.switch_role(slot, wanted_role)
        polls = FleetPolls(f"{slot} served as {role} worker")
        while True:
            fleet = await polls.fleet(client)
            if fleet is not None:
                found = next((found for found in fleet.slots if found.name == slot), cluster_pb2.FleetSlot())
                if found.state != cluster_pb2.SLOT_STATE_SWITCHING:
                    break
            await asyncio.sleep(REFRESH_S)
    if found.state != cluster_pb2.SLOT_STATE_SERVING or found.role != wanted_role:
        state = state_name(found) if found.name else "gone"
        reason = f": {found.reason}" if found.reason else ""
        raise WorkerUnavailable(f"{slot} does not serve as {role} worker, it is {state}{reason}")
    sizes = sizes_text(answer.wanted_prefill, answer.wanted_decode, routers=1)
    console.print(f"{slot} serves as {role} worker; wanted: {sizes}", soft_wrap=True)
