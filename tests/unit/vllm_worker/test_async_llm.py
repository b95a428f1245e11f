"""`AsyncEngine` without vLLM: the tasks of its requests."""

from __future__ import annotations

import asyncio
from typing import Any

from core.request import Request, SamplingParams
from vllm_worker.async_llm import AsyncEngine
from vllm_worker.engine import Prompt


class SlowEngine(AsyncEngine):
    """Its requests take a while to end, as those of vLLM do."""

    async def _generate(self, prompt: Prompt) -> None:  # noqa: ARG002
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.01)


def test_an_aborted_request_does_not_hide_its_successor_of_the_same_name() -> None:
    arguments: Any = None

    def named() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "r"]

    async def run() -> None:
        engine = SlowEngine(arguments)
        prompt = Prompt("r", Request("r", (1,), 1, SamplingParams(max_tokens=1)), offers=False)
        for _ in range(2):
            engine.submit(prompt)
            await asyncio.sleep(0)
            engine.abort("r")
        aborted = named()
        engine.submit(prompt)
        await asyncio.wait(aborted)
        engine.abort("r")
        await asyncio.wait(named(), timeout=10.0)
        assert named() == []

    asyncio.run(run())
