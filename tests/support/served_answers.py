"""Answers of a fleet that `tandem serve` runs with a fake runner: each is read in the background and must be right."""

from __future__ import annotations

import asyncio
from typing import Self

from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2
from tests.support.command import PATIENCE_S
from tests.support.faults import Prompt, Stream, prompt_of

NUM_OUTPUT = 2000  # 4 s at least, at 2 ms a step
ANSWER_WITHIN_S = 300.0  # several answers of 3,500 tokens beside each other took 120 s of a busy machine


class Answer(Stream):
    """One request of a client, read in the background."""

    def __init__(self, client: AsyncClient, prompt: Prompt, num_output: int = NUM_OUTPUT) -> None:
        super().__init__(client, prompt, num_output, ANSWER_WITHIN_S)

    async def begun(self) -> Self:
        return await self.reach(4, PATIENCE_S)

    async def right(self) -> Self:
        """Wait for the end: every token, at the first attempt."""
        await super().right()
        assert self.finished.attempts == 1
        return self


class Load:
    """Clients that send short requests one after the other, until they stop."""

    def __init__(self, address: str, num_clients: int) -> None:
        self.num_right = 0
        self._ending = False
        self._tasks = [asyncio.create_task(self._send(address, number)) for number in range(num_clients)]

    async def _send(self, address: str, number: int) -> None:
        async with client_of(address, find_credentials(None, address)) as client:
            while not self._ending:
                await Answer(client, prompt_of(600 + number), num_output=200).right()
                self.num_right += 1

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)


async def fleet_with(client: AsyncClient, num_workers: int) -> cluster_pb2.GetFleetResponse:
    """The fleet, once it has so many workers, all of which serve."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            fleet = await client.fleet()
            states = [slot.state for slot in fleet.slots if slot.role != cluster_pb2.SERVICE_ROLE_ROUTER]
            if states == [cluster_pb2.SLOT_STATE_SERVING] * num_workers:
                return fleet
            await asyncio.sleep(0.1)
