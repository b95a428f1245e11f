"""A decode worker with vLLM inside, and the way around it: both use the same engine. Runs in vLLM's environment.

python -m benchmarks.vllm.program '{"engine": {...}, "vllm": {...}}' CORE    tables of the config file
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks.processes import obey, take_stdout
from cli.vllm import build_decode_worker
from core.config import from_mapping
from fleet.host.service_host import Placement


class Program:
    """Each public method is a command. They run beside the event loop of the worker."""

    def __init__(self, address: str, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._address, self._llm, self._loop = address, llm, loop
        self._num_asked = 0

    def address(self) -> str:
        return self._address

    def bare(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        """The times of the tokens that AsyncLLM gives, without the worker; as `benchmarks.asking.ask_worker`."""
        return asyncio.run_coroutine_threadsafe(self._generate(prompts, max_tokens), self._loop).result()

    async def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        start = time.perf_counter()

        async def one(prompt: Sequence[int]) -> list[float]:
            self._num_asked += 1
            times: list[float] = []
            tokens = TokensPrompt(prompt_token_ids=list(prompt))
            async for output in self._llm.generate(tokens, sampling, f"bare-{self._num_asked}"):
                times += [time.perf_counter() - start] * len(output.outputs[0].token_ids)
            return times

        return await asyncio.gather(*map(one, prompts))


async def serve(config: dict[str, dict[str, Any]], core: int, answers: TextIO) -> None:
    placement = Placement(ordinal=0, host="", address="", num_threads=1, control=None, cores=(core,), gpus=0.0)
    service: Any = build_decode_worker(from_mapping(config), placement)
    endpoint = await service.start()
    program = Program(endpoint.address, service._engine._llm, asyncio.get_running_loop())
    await asyncio.to_thread(obey, program, answers)
    await service.stop()


if __name__ == "__main__":
    answers = take_stdout()
    asyncio.run(serve(json.loads(sys.argv[1]), int(sys.argv[2]), answers))
