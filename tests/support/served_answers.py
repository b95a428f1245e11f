"""Answers of a fleet that `tandem serve` runs with a fake runner: each is read in the background and must be right."""

from __future__ import annotations

import asyncio

from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2
from tandem_client.stubs.inference_pb2 import Finished, GenerateRequest, SamplingParams, StopConditions, TokenIds
from tests.support.command import PATIENCE_S
from tests.support.faults import Prompt, expected, prompt_of

NUM_OUTPUT = 2000  # 4 s at least, at 2 ms a step
ANSWER_WITHIN_S = 300.0  # several answers of 3,500 tokens beside each other took 120 s of a busy machine


class Answer:
    """One request, read in the background."""

    def __init__(self, client: AsyncClient, prompt: Prompt, num_output: int = NUM_OUTPUT) -> None:
        self.token_ids: list[int] = []
        self.error: CallFailed | None = None
        self.finished = Finished()
        self._client, self._prompt, self._num_output = client, prompt, num_output
        self._grown = asyncio.Condition()
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        request = GenerateRequest(
            token_ids=TokenIds(ids=self._prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=self._num_output, ignore_eos=True),
        )
        try:
            async for response in self._client.generate(request, ANSWER_WITHIN_S):
                self.token_ids += response.tokens.token_ids
                self.finished = response.finished
                async with self._grown:
                    self._grown.notify_all()
        except CallFailed as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return self.reading.done()

    async def begun(self) -> Answer:
        async with asyncio.timeout(PATIENCE_S), self._grown:
            await self._grown.wait_for(lambda: len(self.token_ids) >= 4)
        return self

    async def right(self) -> Answer:
        """Wait for the end: every token, at the first attempt."""
        await self.reading
        assert self.error is None, self.error
        assert self.token_ids == expected(self._prompt, self._num_output)
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
