"""Polls of a fleet whose routers may be replaced meanwhile: the API has no stream of its state.

The router that answers may leave, and its last call may stay without an answer. The client then connects again, to a
router that serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from core.errors import WorkerUnavailable
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2

GONE_S = 15.0  # polls without an answer of a router, longer than one call; beyond: `WorkerUnavailable`
SILENT_S = 60.0  # polls while another router starts: a roll may drain the only one first; beyond: the same
NOT_COMING = {cluster_pb2.SLOT_STATE_SERVING, cluster_pb2.SLOT_STATE_DRAINING}

T = TypeVar("T")


class FleetPolls:
    def __init__(self, until: str) -> None:
        """`until`: what the polls wait for, in the past tense."""
        self._until = until
        self._silent_s = GONE_S
        self._heard_at = asyncio.get_running_loop().time()

    async def ask(self, poll: Awaitable[T]) -> T | None:
        """The answer of the fleet; None if no router answers now. Raises `WorkerUnavailable` if none does for long."""
        loop = asyncio.get_running_loop()
        try:
            answer = await poll
        except CallFailed as error:
            if not error.retryable and error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            if loop.time() - self._heard_at > self._silent_s:
                raise WorkerUnavailable(
                    f"no router has answered for {self._silent_s:g} s: the fleet has ended, or serves at another "
                    f"address, before {self._until} ({error})"
                ) from error
            return None
        self._heard_at = loop.time()
        return answer

    async def fleet(self, client: AsyncClient) -> cluster_pb2.GetFleetResponse | None:
        """As `ask`, of the fleet alone."""
        fleet = await self.ask(client.fleet())
        if fleet is not None:
            self.hear(fleet)
        return fleet

    def hear(self, fleet: cluster_pb2.GetFleetResponse) -> set[int]:
        """The states of the routers. One that starts may be the next to answer."""
        routers: set[int] = {slot.state for slot in fleet.slots if slot.role == cluster_pb2.SERVICE_ROLE_ROUTER}
        self._silent_s = GONE_S if routers <= NOT_COMING else SILENT_S
        return routers
