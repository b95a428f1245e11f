"""The engine generates the same tokens with the C kernels as with plain torch."""

from __future__ import annotations

import numpy as np
import pytest

from core.config import EngineConfig
from core.step import SampledToken, StepPlan
from engine.attention import TorchAttention
from engine.cpu.attention import NativeAttention
from engine.runner import run_step
from engine.torch_runner import TorchRunner
from tests.support.c_kernels import need_compiler
from tests.unit.engine.driving import Engine, chunk_of, request

MODELS = ["llama-tiny", "llama3-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "smollm2-tiny"]
# Natural log, between two bfloat16 implementations that round in different places.
BF16_LOGPROB_TOLERANCE = 0.08


def build(model: str, kernels: str, dtype: str = "float32") -> TorchRunner:
    need_compiler()
    config = EngineConfig(model=f"random:{model}", dtype=dtype, kv_memory_mb=4, num_threads=1, kernels=kernels)
    runner = TorchRunner(config)
    assert runner._model is not None
    assert isinstance(runner._preparer.attention, NativeAttention if kernels == "auto" else TorchAttention)
    return runner


@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_in_float32_are_those_of_plain_torch(model: str) -> None:
    rng = np.random.default_rng(3)
    requests = [
        request(str(length), rng.integers(0, 250, length).tolist(), max_tokens=24) for length in (1, 7, 16, 40, 90)
    ]
    native, plain = (Engine(build(model, kernels), budget=37).generate(*requests) for kernels in ("auto", "torch"))
    assert native == plain
    assert len({tuple(tokens) for tokens in native.values()}) > 1, "the same answer to all shows nothing"


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_log_probabilities_are_within_the_tolerance(model: str) -> None:
    native, plain = (top_tokens(build(model, kernels, "bfloat16")) for kernels in ("auto", "torch"))
    assert_log_probabilities_agree(native, plain, BF16_LOGPROB_TOLERANCE)


def assert_log_probabilities_agree(ours: list[SampledToken], theirs: list[SampledToken], tolerance: float) -> None:
    for found, reference in zip(ours, theirs, strict=True):
        expected = dict(reference.top_logprobs)
        shared = [(logprob, expected[token]) for token, logprob in found.top_logprobs if token in expected]
        assert len(shared) >= 12, "the lists of most likely tokens differ too much"
        assert max(abs(a - b) for a, b in shared) < tolerance


def top_tokens(runner: TorchRunner) -> list[SampledToken]:
    """The token after a prompt in two chunks, and the next token."""
    prompt = [(7 * index + 3) % 250 for index in range(76)]
    places, blocks = ((0, 50), (50, 25), (75, 1)), [4, 1, 7, 2, 9]
    chunks = [chunk_of(prompt, start, count, blocks, num_logprobs=20) for start, count in places]
    return [run_step(runner, StepPlan(index, (chunk,))).sampled["a"][0] for index, chunk in enumerate(chunks)]
