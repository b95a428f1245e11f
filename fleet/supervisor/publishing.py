"""The lists of workers and routers, on their way to each router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from core.service import FleetRouter
from fleet.host.host import Host, HostDied
from fleet.law.events import Member, PublishFleet

PUBLISH_TIMEOUT_S = 1.0  # that the drain of a worker waits for a router that does not answer; below DRAIN_GRACE_S


class Publisher:
    """Delivers the lists in order, the newest last: a router never sees an older list after a newer one."""

    def __init__(self, hosts: Mapping[Member, Host]) -> None:
        """`hosts`: those of the supervisor, at any time."""
        self._hosts = hosts
        self._undelivered: dict[Member, PublishFleet] = {}  # the newest of each router
        self._all_delivered = asyncio.Event()

    def add(self, publication: PublishFleet) -> bool:
        """True if nobody delivers to this router yet: then the caller runs `deliver`."""
        is_new = publication.router not in self._undelivered
        self._undelivered[publication.router] = publication
        self._all_delivered.clear()
        return is_new

    async def deliver(self, router: Member) -> None:
        try:
            while True:
                publication = self._undelivered[router]
                workers = [serving.endpoint for serving in publication.workers]
                routers = [FleetRouter(s.service_id, s.address, s.draining) for s in publication.routers]
                await self._hosts[router].set_fleet(workers, routers)
                if self._undelivered[router] is publication:
                    return
        except (HostDied, KeyError):
            return  # the router is gone; the next one gets the full lists when it starts
        finally:
            self._undelivered.pop(router, None)
            if not self._undelivered:
                self._all_delivered.set()

    async def until_delivered(self) -> None:
        """Wait until every router has the newest lists, or does not answer."""
        if self._undelivered:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_delivered.wait(), PUBLISH_TIMEOUT_S)
