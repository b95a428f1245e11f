"""The engine computes with quantized weights like the dequantized reference, for single requests and in batches.

The reference multiplies the dequantized float32 weights with torch. The kernel also rounds its inputs to 8 bits, so
log-probabilities agree within a tolerance. The kernel's results do not depend on the batch, so chunking and batching
must not change any token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from engine.cpu.attention import NativeAttention
from engine.cpu.quantized_linear import NativeQuantizedMatrix
from engine.linear import PlainLinear
from engine.quantization import MatrixSlot, QuantizedMatrix
from engine.quantized_linear import DequantizedLinear
from engine.torch_runner import TorchRunner
from engine.weights import load_weights
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.model_source import resolve_model
from tests.support.c_kernels import need_compiler, portable_tiles
from tests.unit.engine.cpu.test_runner import MODELS, assert_log_probabilities_agree, top_tokens
from tests.unit.engine.driving import Engine, request
from tests.unit.engine.test_weights import write_random_gguf

QUANTIZATIONS = ["int8", "int4"]
# Natural log, kernel against reference: the error of 8-bit inputs in a model of random weights.
LOGPROB_TOLERANCE = {"float32": 0.12, "bfloat16": 0.15}


def build(model: str, quantization: str, kernels: str = "auto", dtype: str = "float32") -> TorchRunner:
    return TorchRunner(
        EngineConfig(
            model=model, dtype=dtype, quantization=quantization, kv_memory_mb=4, num_threads=1, kernels=kernels
        )
    )


def native(model: str, quantization: str, dtype: str = "float32") -> TorchRunner:
    need_compiler()
    runner = build(f"random:{model}", quantization, dtype=dtype)
    assert runner._model is not None
    assert isinstance(runner._model.layers[0].down, NativeQuantizedMatrix)
    return runner


@pytest.mark.parametrize("dtype", LOGPROB_TOLERANCE)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_those_of_the_dequantized_weights(model: str, quantization: str, dtype: str) -> None:
    ours = top_tokens(native(model, quantization, dtype))
    theirs = top_tokens(build(f"random:{model}", quantization, "torch"))
    assert_log_probabilities_agree(ours, theirs, LOGPROB_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", LOGPROB_TOLERANCE)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("model", ["llama-tiny", "qwen2-tiny", "smollm2-tiny"])
def test_chunks_prefix_hits_and_mixed_batches_change_no_token(model: str, quantization: str, dtype: str) -> None:
    assert_only_the_prompt_decides_tokens(native(model, quantization, dtype))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("model", ["mistral-tiny", "qwen3-tiny"])
def test_by_tiles_too_chunks_prefix_hits_and_mixed_batches_change_no_token(
    model: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of AMX in plain C. Heads of 32 are the smallest that they support."""
    need_compiler()
    monkeypatch.setattr("engine.cpu.kernels.fitting_targets", lambda *_: [portable_tiles()])
    runner = build(f"random:{model}", quantization, dtype="bfloat16")
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
    plain, quantized = (top_tokens(build(str(tmp_path / "tiny.gguf"), kind, "torch")) for kind in ("none", "int8"))
    assert quantized == plain


def test_the_kernel_computes_the_products_if_there_is_one() -> None:
    runner = native("llama-tiny", "int8")
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
