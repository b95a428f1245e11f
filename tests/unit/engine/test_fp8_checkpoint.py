"""Checkpoints of 8-bit floats: every published arrangement of scales gives the weights that it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import ConfigError
from engine.fp8 import CODES, Fp8Matrix
from engine.model_weights import ModelWeights
from engine.torch_runner import TorchRunner
from engine.weights import load_weights
from model_files.model_source import load_config, resolve_model
from tests.support.transformers_models import save_reference
from tests.unit.engine.driving import Engine, request

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


def loaded(directory: Path, quantization: str = "none") -> ModelWeights:
    source = resolve_model(str(directory))
    return load_weights(source, load_config(source), torch.float32, torch.device("cpu"), quantization=quantization)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_weights_are_codes_times_scales(arrangement: str, tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, arrangement)
    weights = loaded(tmp_path)
    assert len(meant) == 21
    for name, slot in weights.slots().items():
        if name in meant:
            assert torch.equal(slot, meant[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("arrangement", ["matrix", "row"])
def test_fp8_weights_take_the_codes_as_they_are(arrangement: str, tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, arrangement)
    layer = loaded(tmp_path, "fp8").layers[0]
    assert isinstance(layer.down, Fp8Matrix)
    assert torch.equal(layer.down.dequantized(), meant["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(layer.qkv.dequantized()[:48], meant["model.layers.0.self_attn.q_proj.weight"])  # type: ignore[union-attr]


def test_scales_of_blocks_become_scales_of_rows(tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    meant = write(tmp_path, "block")["model.layers.0.mlp.down_proj.weight"]
    found = loaded(tmp_path, "fp8").layers[0].down
    assert isinstance(found, Fp8Matrix)
    error = (found.dequantized() - meant).abs()
    assert error.max() > 0
    assert (error <= meant.abs() / 16 + found.scales[:, None] * 2**-10 * 1.001).all()


def test_an_engine_computes_the_tokens_of_the_same_weights_in_float32(tmp_path: Path) -> None:
    reference, fp8 = tmp_path / "plain", tmp_path / "fp8"
    for directory in (reference, fp8):
        save_reference("llama3", directory)
    meant = write(fp8, "row")
    save_file(load_file(reference / "model.safetensors") | meant, reference / "model.safetensors")
    wanted = request("a", range(3, 60))
    tokens = []
    for directory in (reference, fp8):
        config = EngineConfig(model=str(directory), dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
        tokens.append(Engine(TorchRunner(config)).generate(wanted))
    assert tokens[0] == tokens[1]


def test_a_matrix_without_scales_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_reference("llama3", tmp_path)
    write(tmp_path, "block", weight_block_size=[7, 7])
    with pytest.raises(ConfigError, match=r"q_proj.weight has scales of shape \[3, 2\], which do not fit \[48, 48\]"):
        loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "scale" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj.weight is of 8 bits, and the checkpoint has no .*weight_scale"):
        loaded(tmp_path)
