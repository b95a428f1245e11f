"""A whole model on the interpreted kernels: `GpuRunner` gives the tokens of `TorchRunner`."""

from __future__ import annotations

import pytest
import torch

from core.config import EngineConfig
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
