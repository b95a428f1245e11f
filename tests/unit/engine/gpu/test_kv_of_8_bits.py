"""A KV pool of 8 bits with scales: the runner of a GPU on the CPU, near the runner with an exact pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv_layout import FLOAT8
from engine.factory import build_runner
from engine.fp8 import CODES
from engine.gpu.reference import quantized
from engine.gpu.runner import GpuRunner
from engine.gpu.step_attention import EXPANDED_BYTES, ExpandedPrompts
from engine.runner import StepLimits
from tests.unit.engine.driving import Engine, chunk_of, request

PROMPT = [(7 * index + 3) % 250 for index in range(90)]
EXACT = EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
CONFIG = replace(EXACT, kv_dtype="fp8")
LIMITS = StepLimits(max_running=8, max_batched_tokens=64)
REQUESTS = [request("greedy", PROMPT[:40]), request("drawn", PROMPT[3:20], temperature=0.9, seed=4)]


@pytest.fixture(scope="module")
def runner() -> Iterator[GpuRunner]:
    built = GpuRunner(CONFIG, limits=LIMITS)
    yield built
    built.close()


@pytest.mark.parametrize("num_blocks", [1, 4000])
def test_the_memory_of_expanded_prompts_is_that_of_the_largest_step(num_blocks: int) -> None:
    """So a measured step of any size tells the pool what every step needs."""
    pool = torch.empty(8, 2, 2, 8, 16, 128, dtype=CODES, device="meta")
    scales = torch.empty(8, 2, 2, 8, 16, device="meta")
    heads = torch.empty(30, 48, 128, dtype=torch.bfloat16, device="meta")
    expanded = ExpandedPrompts(pool, scales, torch.empty(num_blocks, dtype=torch.int32, device="meta"), heads)
    assert expanded._expanded.untyped_storage().nbytes() == EXPANDED_BYTES
    assert expanded._expanded.shape == (num_blocks, 1, 2, 8 if num_blocks == 1 else 4, 16, 128)


def test_a_row_keeps_its_values_within_a_sixteenth() -> None:
    """3 bits of mantissa round by at most 1/16; below 2^-6 of the largest code, by at most half of 2^-9."""
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 1000)[:, None]
    codes, scales = quantized(rows)
    bound = torch.maximum(rows.abs() / 16, scales[:, None] * 2.0**-10)
    assert ((codes.float() * scales[:, None] - rows).abs() <= bound * 1.0001).all()
    zeros, scale = quantized(torch.zeros(2, 8))
    assert (zeros.float() * scale[:, None] == 0).all()


def test_logits_stay_near_those_of_an_exact_pool(runner: GpuRunner) -> None:
    """Within a tenth of their spread, after a prompt, behind a cached prefix, and in decoding."""
    exact = GpuRunner(EXACT, limits=LIMITS)
    plans = [
        [chunk_of(PROMPT, 0, 60, [0, 1, 2, 3])],
        [chunk_of(PROMPT, 60, 20, [0, 1, 2, 3, 4]), chunk_of(PROMPT, 0, 9, [5], "b")],
        [chunk_of(PROMPT, 80, 1, [0, 1, 2, 3, 4, 6]), chunk_of(PROMPT, 9, 1, [5], "b")],
    ]
    for chunks in plans:
        found, expected = runner.logits(chunks), exact.logits(chunks)
        difference = (found - expected).pow(2).mean().sqrt() / expected.std()
        assert 0 < difference < 0.1, "zero would mean that the pool is exact"


def test_the_layout_tells_the_pools_apart_and_counts_the_scales(runner: GpuRunner) -> None:
    exact = replace(runner.layout, dtype="float32")
    assert runner.layout.dtype == FLOAT8
    assert runner.layout.block_bytes == exact.block_bytes // 4 + exact.block_bytes // exact.head_dim
    assert runner.sizes is not None
    assert runner.sizes.kv_bytes == runner.layout.token_bytes


@pytest.mark.parametrize("with_graphs", [True, False])
def test_a_poisoned_pool_and_graphs_change_no_token(with_graphs: bool, runner: GpuRunner) -> None:
    expected = Engine(runner, budget=30).generate(*REQUESTS)
    poisoned = GpuRunner(CONFIG, limits=LIMITS, with_graphs=with_graphs)
    poisoned._pool._bytes.fill_(0xFF)
    assert poisoned._pool.scales is not None
    assert bool(poisoned._pool.scales.isnan().all())
    assert bool(poisoned._pool.tensor.float().isnan().all())
    assert Engine(poisoned, budget=30).generate(*REQUESTS) == expected


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_runner_of_a_cpu_refuses_it_by_name(kernels: str) -> None:
    with pytest.raises(ConfigError, match="kv_dtype = fp8 needs a GPU and kernels = auto"):
        build_runner(replace(CONFIG, kernels=kernels))
