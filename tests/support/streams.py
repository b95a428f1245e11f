"""Requests that are answered while a test does something else."""

from __future__ import annotations

import asyncio

from tandem_client.stubs import inference_pb2
from tests.support.deployment import Answer, Deployment
from tests.support.waiting import until


class Streams:
    """Requests that are answered in the background."""

    def __init__(self, deployment: Deployment, requests: list[inference_pb2.GenerateRequest]) -> None:
        self._deployment = deployment
        self.answers = [Answer() for _ in requests]
        self._tasks = [asyncio.create_task(self._read(*pair)) for pair in zip(requests, self.answers, strict=True)]

    async def _read(self, request: inference_pb2.GenerateRequest, answer: Answer) -> None:
        async for response in self._deployment.inference.Generate(request, timeout=60.0):
            answer.take(response)

    async def reach(self, num_tokens: int) -> None:
        def enough() -> bool:
            return all(len(answer.token_ids) >= num_tokens for answer in self.answers)

        await until(enough, f"every stream has {num_tokens} tokens")

    async def finished(self) -> list[inference_pb2.Finished]:
        await asyncio.gather(*self._tasks)
        return [answer.finished for answer in self.answers]
