"""Pools with blocks of different sizes serve as one: the same tokens, cached prefixes are found, no block is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from core.request import Request, SamplingParams
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.reference import CoLocatedEngine

BLOCK = 16
NUM_OUTPUT = 12
PREFILL_SIZES = [BLOCK // 4, BLOCK * 2]
PROMPT = tuple(range(1, 7 * BLOCK + 4))  # ends in the middle of a block of each size


@pytest.fixture(params=PREFILL_SIZES)
async def deployment(model: str, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    config = tiny_config(model, transport="nixl")
    config = replace(config, engine=replace(config.engine, block_size=BLOCK, prefill_block_size=request.param))
    async with deploy(config) as deployment:
        yield deployment


def expected(engine: CoLocatedEngine, prompt: tuple[int, ...]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT)
    return engine.generate(Request("reference", prompt, len(prompt), sampling))


async def test_every_token_is_that_of_one_engine_and_prefixes_are_found_on_either_side(
    deployment: Deployment, engine: CoLocatedEngine
) -> None:
    sizes = [worker._parts.agent.address.layout.block_size for worker in deployment.workers]
    assert sizes[0] != sizes[1] == BLOCK
    longer = (*PROMPT, *range(200, 240))
    for prompt, least_cached in ((PROMPT, 0), (PROMPT, 6 * BLOCK), (longer, 6 * BLOCK), (PROMPT[:BLOCK], 0)):
        answer = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT)
        assert answer.token_ids == expected(engine, prompt)
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        assert answer.finished.attempts == 1
        assert answer.finished.usage.cached_tokens >= least_cached
    await deployment.settle()
    deployment.drop_caches(deployment.decode)
    again = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT)
    assert again.token_ids == expected(engine, PROMPT)
    assert again.finished.transferred_bytes >= engine.runner.layout.block_bytes * 7, "the whole prompt moves again"
    await deployment.settle()
