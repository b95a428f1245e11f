"""A driver that brings up a fleet of fake services and then waits: run as a process of its own, to be killed.

Usage: python -m tests.integration.fleet_driver JOURNAL [HOST:PORT of a Ray cluster to join [resource of routers]]

KINSHIP in the environment lets its services outlive it; ADOPTION_S says for how long. A line of the standard input,
such as "decode 0", resizes a pool; the answer is a line such as "pinned: decode", of all pools that were resized.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from fleet.law.events import FleetReady
from fleet.ray.cluster import Cluster, connect
from tests.integration.fake_services import fake_fleet


async def main() -> None:
    journal, address, router_resource = [*sys.argv[1:], "", ""][:3]
    adoption_s = float(os.environ.get("ADOPTION_S", "600"))
    config = ClusterConfig(
        address=address, router_resource=router_resource, max_workers=4, adoption_timeout_s=adoption_s
    )
    cluster = connect(config)
    await cluster.start(replace(fake_fleet(Path(journal), config), kinship=os.environ.get("KINSHIP", "")))
    await asyncio.gather(print_updates(cluster), resize_pools(cluster))


async def print_updates(cluster: Cluster) -> None:
    while True:
        for update in await cluster.updates():
            print("ready" if isinstance(update, FleetReady) else update, flush=True)


async def resize_pools(cluster: Cluster) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        role, size = line.split()
        await cluster.control.scale({ServiceRole(role): int(size)})
        pinned = (await cluster.control.status()).planner.pinned
        print("pinned:", *(role.value for role in pinned), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
