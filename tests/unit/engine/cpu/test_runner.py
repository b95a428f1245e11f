"""The engine computes with the C kernels as with plain torch, and with quantized weights as with dequantized ones.

The kernel of quantized products also rounds its inputs to 8 bits, so log-probabilities agree within a tolerance. Its
results do not depend on the batch, so chunking and batching must not change any token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.step import SampledToken, StepPlan
from engine.attention import TorchAttention
from engine.cpu.attention import NativeAttention
from engine.cpu.quantized_linear import NativeQuantizedMatrix
from engine.linear import PlainLinear
from engine.quantization import MatrixSlot, QuantizedMatrix
from engine.quantized_linear import DequantizedLinear
from engine.runner import run_step
from engine.torch_runner import TorchRunner
from engine.weights import load_weights
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.model_source import resolve_model
from tests.support.c_kernels import need_compiler, portable_tiles
from tests.unit.engine.driving import Engine, chunk_of, request
from tests.unit.engine.test_weights import write_random_gguf

MODELS = ["llama-tiny", "llama3-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "smollm2-tiny"]
QUANTIZATIONS = ["int8", "int4"]
# Natural log, between two bfloat16 implementations that round in different places.
BF16_LOGPROB_TOLERANCE = 0.08
# Kernel against reference: the error of 8-bit inputs in a model of random weights.
QUANTIZED_LOGPROB_TOLERANCE = {"float32": 0.12, "bfloat16": 0.15}


def build(model: str, kernels: str = "auto", dtype: str = "float32", quantization: str = "none") -> TorchRunner:
    config = EngineConfig(
        model=model, dtype=dtype, quantization=quantization, kv_memory_mb=4, num_threads=1, kernels=kernels
    )
    return TorchRunner(config)


def native(model: str, dtype: str = "float32", quantization: str = "none") -> TorchRunner:
    need_compiler()
    runner = build(f"random:{model}", "auto", dtype, quantization)
    assert runner._model is not None
    assert isinstance(runner._preparer.attention, NativeAttention)
    assert isinstance(runner._model.layers[0].down, NativeQuantizedMatrix) == (quantization != "none")
    return runner


def plain(model: str, dtype: str = "float32", quantization: str = "none") -> TorchRunner:
    runner = build(f"random:{model}", "torch", dtype, quantization)
    assert isinstance(runner._preparer.attention, TorchAttention)
    return runner


@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_in_float32_are_those_of_plain_torch(model: str) -> None:
    rng = np.random.default_rng(3)
    requests = [
        request(str(length), rng.integers(0, 250, length).tolist(), max_tokens=24) for length in (1, 7, 16, 40, 90)
    ]
    found, expected = (Engine(runner, budget=37).generate(*requests) for runner in (native(model), plain(model)))
    assert found == expected
    assert len({tuple(tokens) for tokens in found.values()}) > 1, "the same answer to all shows nothing"


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_log_probabilities_are_within_the_tolerance(model: str) -> None:
    ours, theirs = (top_tokens(runner) for runner in (native(model, "bfloat16"), plain(model, "bfloat16")))
    assert_log_probabilities_agree(ours, theirs, BF16_LOGPROB_TOLERANCE)


@pytest.mark.parametrize("dtype", QUANTIZED_LOGPROB_TOLERANCE)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_those_of_the_dequantized_weights(model: str, quantization: str, dtype: str) -> None:
    ours = top_tokens(native(model, dtype, quantization))
    theirs = top_tokens(plain(model, quantization=quantization))
    assert_log_probabilities_agree(ours, theirs, QUANTIZED_LOGPROB_TOLERANCE[dtype])


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


@pytest.mark.parametrize("dtype", QUANTIZED_LOGPROB_TOLERANCE)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("model", ["llama-tiny", "qwen2-tiny", "smollm2-tiny"])
def test_chunks_prefix_hits_and_mixed_batches_change_no_token(model: str, quantization: str, dtype: str) -> None:
    assert_only_the_prompt_decides_tokens(native(model, dtype, quantization))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("model", ["mistral-tiny", "qwen3-tiny"])
def test_by_tiles_too_chunks_prefix_hits_and_mixed_batches_change_no_token(
    model: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of AMX in plain C. Heads of 32 are the smallest that they support."""
    monkeypatch.setattr("engine.cpu.kernels.fitting_targets", lambda *_: [portable_tiles()])
    runner = native(model, "bfloat16", quantization)
    assert isinstance(runner._preparer.attention, NativeAttention)
    assert "tiles" in runner._preparer.attention.kernels.library.name
    assert_only_the_prompt_decides_tokens(runner)


def assert_only_the_prompt_decides_tokens(runner: TorchRunner) -> None:
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 250, 48).tolist()
    requests = [
        request(str(n), shared[: n // 2] + rng.integers(0, 250, n - n // 2).tolist(), max_tokens=16)
        for n in (1, 3, 15, 16, 17, 64, 96)
    ]
    alone = {wanted.request_id: Engine(runner).generate(wanted)[wanted.request_id] for wanted in requests}
    engine = Engine(runner, budget=23)
    assert engine.generate(*requests) == alone
    assert engine.max_chunks_of_one == 1
    assert engine.generate(*requests) == alone
    assert engine.num_cached_tokens["96"] >= 80, "the second time, prefixes are hits"
    assert len({tuple(tokens) for tokens in alone.values()}) > 1, "the same answer to all shows nothing"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_matrices_have_the_configured_bits(quantization: str) -> None:
    config = RANDOM_CONFIGS["smollm2-tiny"]
    source = resolve_model("random:smollm2-tiny")
    weights = load_weights(source, config, torch.float32, torch.device("cpu"), quantization)
    slots = weights.slots()
    bits = {name: slot.bits for name, slot in slots.items() if isinstance(slot, MatrixSlot)}
    assert bits.pop("model.embed_tokens.weight") == 8
    assert set(bits.values()) == {8 if quantization == "int8" else 4}
    assert all(isinstance(slot, MatrixSlot) or len(slot.shape) == 1 for slot in slots.values())
    assert weights.head is weights.embedding, "tied: in memory once"


@pytest.mark.parametrize("model", ["llama-tiny", "llama3-tiny"])
def test_a_gguf_of_8_bits_is_the_same_model_in_int8(tmp_path: Path, model: str) -> None:
    """int8 keeps every code of the file, with the rows of q and k reordered."""
    write_random_gguf(tmp_path / "tiny.gguf", model)
    exact, quantized = (
        top_tokens(build(str(tmp_path / "tiny.gguf"), "torch", quantization=kind)) for kind in ("none", "int8")
    )
    assert quantized == exact


def test_the_kernel_computes_the_products_if_there_is_one() -> None:
    runner = native("llama-tiny", quantization="int8")
    assert runner.layout.quantization == "int8"
    assert runner._model is not None
    for layer in runner._model.layers:
        assert all(isinstance(product, NativeQuantizedMatrix) for product in (layer.qkv, layer.output, layer.down))


def test_the_error_for_a_gpu_names_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="quantization = int4 is for CPUs: set it to none or fp8, or device to cpu"):
        TorchRunner(EngineConfig(model="random:llama-tiny", quantization="int4", device="cuda", num_threads=1))


def test_a_method_for_plain_matrices_refuses_a_quantized_matrix() -> None:
    weights = load_weights(
        resolve_model("random:llama-tiny"),
        RANDOM_CONFIGS["llama-tiny"],
        torch.float32,
        torch.device("cpu"),
        quantization="int8",
    )
    assert isinstance(weights.head, QuantizedMatrix)
    with pytest.raises(AssertionError, match="needs another method"):
        PlainLinear().prepare(weights.head, None)
    assert DequantizedLinear().prepare(weights.head, None)(torch.eye(64)).shape == (64, weights.head.num_rows)
