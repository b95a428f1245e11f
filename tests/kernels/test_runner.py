"""A whole model on the interpreted kernels: `GpuRunner` gives the tokens of `TorchRunner`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.runner import GpuRunner
from engine.kv_pool import PoolOrder
from engine.runner import StepLimits
from engine.torch_runner import TorchRunner
from tests.unit.engine.driving import Engine, request

PROMPT = [(7 * index + 3) % 250 for index in range(40)]
CONFIG = EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
REQUESTS = [request("long", PROMPT, max_tokens=3), request("short", PROMPT[:17], max_tokens=3)]


@pytest.mark.parametrize("order", PoolOrder)
def test_a_poisoned_pool_and_chunked_prompts_give_the_tokens_of_the_torch_runner(order: PoolOrder) -> None:
    plain = TorchRunner(CONFIG)
    expected = Engine(plain, budget=30).generate(*REQUESTS)
    plain.close()
    limits = StepLimits(max_running=2, max_batched_tokens=30)
    runner = GpuRunner(CONFIG, limits=limits, pool_order=order, with_graphs=False)
    runner._pool.tensor.fill_(torch.nan)
    assert Engine(runner, budget=30).generate(*REQUESTS) == expected
    runner.close()


def test_a_pool_of_8_bits_keeps_the_logits_near_those_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    runner = GpuRunner(replace(CONFIG, kv_dtype="fp8"), limits=StepLimits(2, 16), with_graphs=False)
    runner._pool._bytes.fill_(0xFF)
    view = SequenceView("a", PROMPT, 18, [3, 1], SamplingParams(max_tokens=3, temperature=0.0))
    for start, count in ((0, 17), (17, 1)):
        chunks = [ScheduledChunk(view, start, count, True, False)]
        found, expected = runner.logits(chunks), plain.logits(chunks)
        assert 0 < (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()
