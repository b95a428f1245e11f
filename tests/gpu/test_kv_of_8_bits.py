"""A KV pool of 8 bits on a GPU: its logits beside those of an exact pool, in prompts, behind a prefix and in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from tests.unit.engine.driving import Engine, chunk_of, request

PROMPT = [(7 * index + 3) % 250 for index in range(90)]
LIMITS = StepLimits(max_running=8, max_batched_tokens=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_stay_near_those_of_an_exact_pool(dtype: str) -> None:
    exact = EngineConfig(model="random:llama3-tiny", dtype=dtype, kv_memory_mb=8, device="cuda")
    runners = [GpuRunner(replace(exact, kv_dtype=name), limits=LIMITS) for name in ("fp8", "auto")]
    runners[0]._pool._bytes.fill_(0xFF)
    torch.cuda.synchronize()
    for start, count in ((0, 60), (60, 20), (80, 1)):
        chunk = chunk_of(PROMPT, start, count, [4, 1, 2, 3, 0, 6])
        found, expected = (runner.logits([chunk]) for runner in runners)
        assert 0 < (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()
    eager = GpuRunner(replace(exact, kv_dtype="fp8"), limits=LIMITS, with_graphs=False)
    if dtype == "float32":
        wanted = [request("a", PROMPT[:40]), request("b", PROMPT[3:20])]
        assert Engine(runners[0], budget=30).generate(*wanted) == Engine(eager, budget=30).generate(*wanted)
