"""Two pools with quantized weights, 8-bit KV or blocks of two sizes say what one engine says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.config import EngineConfig
from engine.fake_runner import FakeRunner
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from protos.codec import decode_layout, encode_layout
from tandem_client.stubs import inference_pb2
from tests.support.deployment import deploy, tiny_config
from tests.support.reference import CoLocatedEngine, random_prompt

BLOCK = 16


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
async def test_two_pools_say_what_one_engine_says(quantization: str, dtype: str) -> None:
    """Also in bfloat16, and though the pools cut and mix the prompts otherwise: the kernel does not see the batch."""
    config = tiny_config("random:llama-tiny", transport="nixl")
    config = replace(config, engine=replace(config.engine, quantization=quantization, dtype=dtype))
    engine = CoLocatedEngine(replace(config.engine, kv_memory_mb=32))
    shared = random_prompt(3 * BLOCK, seed=1)
    prompts = [shared[: BLOCK * (i % 4)] + random_prompt(1 + 13 * i, seed=20 + i) for i in range(8)]
    async with deploy(config) as deployment:
        answers = await asyncio.gather(*(deployment.generate(token_ids=prompt, max_tokens=12) for prompt in prompts))
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.token_ids == engine.tokens(prompt, 12)
            assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()
    engine.close()


@pytest.mark.parametrize(
    ("kv_dtype", "prefill_block_size"), [("auto", BLOCK // 4), ("auto", BLOCK * 2), ("fp8", BLOCK), ("fp8", BLOCK // 4)]
)
async def test_pools_with_scales_or_blocks_of_two_sizes_say_what_one_engine_says_and_either_side_finds_prefixes(
    kv_dtype: str, prefill_block_size: int
) -> None:
    """The fake engine reads every byte of a slot, its scales too."""
    config = tiny_config(transport="nixl")
    own = replace(config.engine, kv_dtype=kv_dtype, block_size=BLOCK)
    engine = CoLocatedEngine(own)
    assert engine.runner.layout.has_scales == (kv_dtype == "fp8")
    config = replace(config, engine=replace(own, prefill_block_size=prefill_block_size))
    first = random_prompt(7 * BLOCK + 3)  # ends in the middle of a block of each size
    longer = first + random_prompt(40, seed=1)
    async with deploy(config) as deployment:
        sizes = [worker._parts.agent.address.layout.block_size for worker in deployment.workers]
        assert sizes == [prefill_block_size, BLOCK]
        for prompt, least_cached in ((first, 0), (first, 6 * BLOCK), (longer, 6 * BLOCK), (first[:BLOCK], 0)):
            answer = await deployment.generate(token_ids=prompt, max_tokens=12)
            assert answer.token_ids == engine.tokens(prompt, 12)
            assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
            assert answer.finished.attempts == 1
            assert answer.finished.usage.cached_tokens >= least_cached
        await deployment.settle()
        deployment.drop_caches(deployment.decode)
        again = await deployment.generate(token_ids=first, max_tokens=12)
        assert again.token_ids == engine.tokens(first, 12)
        assert again.finished.transferred_bytes >= engine.runner.layout.block_bytes * 7, "the whole prompt moves again"
        await deployment.settle()
    engine.close()


async def test_two_pools_of_8_bits_on_the_runner_of_a_gpu_say_what_one_engine_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(config: EngineConfig, *_: object, **__: object) -> GpuRunner:
        return GpuRunner(config, limits=StepLimits(32, 64), with_graphs=False)

    config = tiny_config("random:llama-tiny", transport="nixl")
    config = replace(config, engine=replace(config.engine, kv_dtype="fp8", device="cpu", prefill_block_size=2 * BLOCK))
    engine = CoLocatedEngine(replace(config.engine, kv_dtype="auto"))
    engine.runner = build(config.engine)
    monkeypatch.setattr("engine.factory.build_runner", build)
    async with deploy(config) as deployment:
        for prompt in (random_prompt(3 * BLOCK), random_prompt(5 * BLOCK + 3)):
            answer = await deployment.generate(token_ids=prompt, max_tokens=12)
            assert answer.token_ids == engine.tokens(prompt, 12)
            assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()
    engine.close()


def test_a_peer_that_says_nothing_of_quantization_has_none() -> None:
    layout = FakeRunner.from_config(EngineConfig(model="fake:tiny")).layout
    wire = encode_layout(layout)
    wire.ClearField("quantization")
    assert decode_layout(wire) == layout
