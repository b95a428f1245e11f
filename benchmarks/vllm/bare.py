"""The bare engine beside its worker. Runs in the process of the worker, in vLLM's environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any


async def bare(service: Any, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> list[list[float]]:
    """The times of the tokens that AsyncLLM gives, without the worker; as `ask_worker`."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    start = time.perf_counter()

    async def one(number: int, prompt: Sequence[int]) -> list[float]:
        times: list[float] = []
        tokens = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in service._engine._llm.generate(tokens, sampling, f"bare-{repeat}-{number}"):
            times += [time.perf_counter() - start] * len(output.outputs[0].token_ids)
        return times

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
