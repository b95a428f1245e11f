"""Weights in fp8: bounded rounding errors, the right matrices, and the same tokens on every path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import ConfigError
from engine import fp8
from engine.fp8 import CODES, LARGEST_CODE, Fp8Matrix
from engine.fp8_checkpoint import Fp8Checkpoint
from engine.gpu.runner import GpuRunner
from engine.quantization import head_weight_bytes, weight_bytes
from engine.runner import Runner
from engine.torch_runner import TorchRunner
from engine.weights import load_weights
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.model_source import resolve_model
from tests.support.transformers_models import save_reference
from tests.unit.engine.driving import Engine, request
from tests.unit.engine.test_weights import load, write_random_gguf

CPU = torch.device("cpu")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def matrix_of(weight: torch.Tensor) -> Fp8Matrix:
    matrix = Fp8Matrix(weight.shape[0], weight.shape[1], torch.float32, CPU)
    matrix.put(0, weight)
    return matrix


def test_no_error_is_larger_than_a_sixteenth_of_the_weight_or_half_the_smallest_code() -> None:
    weight = normal(50, 300)
    error = (matrix_of(weight).dequantized() - weight).abs()
    smallest = weight.abs().amax(-1, keepdim=True) / LARGEST_CODE * 2**-9
    assert (error <= torch.maximum(weight.abs() / 16, smallest / 2) * 1.001).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-20, 1e30])
def test_rows_of_one_value_keep_it(value: float) -> None:
    weight = torch.full((2, 40), value)
    torch.testing.assert_close(matrix_of(weight).dequantized(), weight, rtol=1e-6, atol=0)


def test_the_matrices_of_layers_are_fp8_and_the_embedding_and_the_head_are_not() -> None:
    source, config = resolve_model("random:qwen2-tiny"), RANDOM_CONFIGS["qwen2-tiny"]
    weights = load_weights(source, config, torch.bfloat16, CPU, quantization="fp8")
    assert isinstance(weights.embedding, torch.Tensor)
    assert isinstance(weights.head, torch.Tensor)
    for layer in weights.layers:
        assert all(isinstance(matrix, Fp8Matrix) for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down))
    plain = load_weights(source, config, torch.bfloat16, CPU)
    assert isinstance(plain.layers[0].qkv, torch.Tensor)
    found = weights.layers[0].qkv.dequantized()  # type: ignore[union-attr]
    torch.testing.assert_close(found, plain.layers[0].qkv, rtol=0.07, atol=1e-4)
    assert weight_bytes("bfloat16", "fp8") == 1.0
    assert head_weight_bytes("bfloat16", "fp8") == 2.0


def config(model: str, quantization: str = "fp8", **options: object) -> EngineConfig:
    settings = {"dtype": "float32", "kv_memory_mb": 4, "num_threads": 1, "device": "cpu"} | options
    return EngineConfig(model=model, quantization=quantization, **settings)  # type: ignore[arg-type]


def test_the_sizes_for_metrics_count_the_head_in_its_own_dtype() -> None:
    sizes = TorchRunner(config("random:llama-tiny", dtype="bfloat16")).sizes
    assert sizes is not None
    all_weights = sizes.num_layer_weights + sizes.num_head_weights
    assert sizes.weight_bytes == (sizes.num_layer_weights + 2 * sizes.num_head_weights) / all_weights


def generate(runner: Runner) -> dict[str, list[int]]:
    rng = np.random.default_rng(4)
    requests = [request(str(n), rng.integers(0, 250, n).tolist(), max_tokens=12) for n in (1, 15, 33, 64)]
    return Engine(runner, budget=40).generate(*requests)


@pytest.mark.parametrize("model", ["qwen2-tiny", "smollm2-tiny"])
def test_every_runner_gives_the_same_tokens(model: str) -> None:
    """The operator multiplies codes, the plain path dequantized weights."""
    plain = generate(TorchRunner(config(f"random:{model}", kernels="torch")))
    assert generate(GpuRunner(config(f"random:{model}"))) == plain
    assert generate(TorchRunner(config(f"random:{model}"))) == plain
    assert generate(TorchRunner(config(f"random:{model}", "none"))) != plain, "else fp8 would not show"


def test_rows_are_written_where_they_belong_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_ROWS_AT_ONCE", 3)
    matrix, rows = Fp8Matrix(10, 4, torch.float32, CPU), torch.arange(1.0, 41.0).view(10, 4).exp2() / 2**20
    for first, last in ((7, 10), (0, 7)):
        matrix.put(first, rows[first:last])
    torch.testing.assert_close(matrix.dequantized(), rows, rtol=0.07, atol=0.0)


def test_a_gguf_is_quantized_to_fp8(tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "tiny.gguf", "llama-tiny")
    found = generate(TorchRunner(config(str(tmp_path / "tiny.gguf"))))
    assert found.keys() == {"1", "15", "33", "64"}


# ---- Checkpoints of 8-bit floats: every published arrangement of scales gives the weights that it means.

BLOCK = [16, 32]
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
# Arrangement -> the quantization_config, and the ending of a tensor of scales.
ARRANGEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "matrix": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
    "row": (COMPRESSED, "weight_scale"),
    "block": ({"quant_method": "fp8", "weight_block_size": BLOCK}, "weight_scale_inv"),
}


def quantized(weight: torch.Tensor, arrangement: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales as the checkpoint has them, and the weights that they mean."""
    sizes = weight.abs()
    if arrangement == "matrix":
        scales = sizes.max() / 448
        wide = scales.expand(weight.shape)
    elif arrangement == "row":
        scales = (sizes.amax(1, keepdim=True) / 440).bfloat16()  # no code of a row need be the largest
        wide = scales.float().expand(weight.shape)
    else:
        rows, columns = (-(-size // of) for size, of in zip(weight.shape, BLOCK, strict=True))
        scales = torch.zeros(rows, columns)
        wide = torch.zeros(weight.shape)
        for row in range(rows):
            for column in range(columns):
                place = (slice(row * 16, row * 16 + 16), slice(column * 32, column * 32 + 32))
                scales[row, column] = sizes[place].max() / 448
                wide[place] = scales[row, column]
    codes = (weight / wide).clamp(-448, 448).to(CODES)
    return codes, scales, codes.float() * wide


def write(directory: Path, arrangement: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Quantize the matrices of a checkpoint. Returns the weights that it now means, by name."""
    settings, ending = ARRANGEMENTS[arrangement]
    tensors, meant = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name], scales, meant[name] = quantized(tensors[name], arrangement)
        tensors[f"{name.removesuffix('weight')}{ending}"] = scales
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings | changes}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


def test_a_block_larger_than_its_matrix_is_the_matrix() -> None:
    """Without a tensor of the block's size."""
    checkpoint = Fp8Checkpoint(lambda name: torch.full((1, 1), 2.0) if "inv" in name else None, (1 << 40, 1 << 62))
    found = checkpoint.dequantized("a.weight", torch.ones(3, 5).to(CODES))
    assert torch.equal(found, torch.full((3, 5), 2.0))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_weights_are_codes_times_scales(arrangement: str, tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, arrangement)
    weights = load(tmp_path)
    assert len(meant) == 21
    for name, slot in weights.slots().items():
        if name in meant:
            assert torch.equal(slot, meant[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("arrangement", ["matrix", "row"])
def test_fp8_weights_take_the_codes_as_they_are(arrangement: str, tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, arrangement)
    layer = load(tmp_path, "fp8").layers[0]
    assert isinstance(layer.down, Fp8Matrix)
    assert torch.equal(layer.down.dequantized(), meant["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(layer.qkv.dequantized()[:48], meant["model.layers.0.self_attn.q_proj.weight"])  # type: ignore[union-attr]


def test_scales_of_blocks_become_scales_of_rows(tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, "block")["model.layers.0.mlp.down_proj.weight"]
    found = load(tmp_path, "fp8").layers[0].down
    assert isinstance(found, Fp8Matrix)
    error = (found.dequantized() - meant).abs()
    assert error.max() > 0
    assert (error <= meant.abs() / 16 + found.scales[:, None] * 2**-10 * 1.001).all()


def test_a_matrix_without_scales_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    write(tmp_path, "block", weight_block_size=[7, 7])
    with pytest.raises(ConfigError, match=r"q_proj.weight has scales of shape \[3, 2\], which do not fit \[48, 48\]"):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "scale" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj.weight is of 8 bits, and the checkpoint has no .*weight_scale"):
        load(tmp_path)
