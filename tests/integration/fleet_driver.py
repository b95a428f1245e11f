"""A driver that brings up a fleet of fake services and then waits: run as a process of its own, to be killed.

Usage: python -m tests.integration.fleet_driver JOURNAL [HOST:PORT of a Ray cluster to join [resource of routers]]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from core.config import ClusterConfig
from fleet.cluster import connect
from fleet.events import FleetReady
from tests.integration.fake_services import fake_fleet


async def main() -> None:
    journal, address, router_resource = [*sys.argv[1:], "", ""][:3]
    config = ClusterConfig(address=address, router_resource=router_resource, max_workers=4)
    cluster = connect(config)
    await cluster.start(fake_fleet(Path(journal), config))
    while True:
        for update in await cluster.updates():
            print("ready" if isinstance(update, FleetReady) else update, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
