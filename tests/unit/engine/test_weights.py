"""Weights of every file format fill the right slots, and errors name the wrong tensor."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import ConfigError
from core.step import StepPlan
from engine import weights
from engine.loading import ModelSetup
from engine.model_weights import ModelWeights
from engine.runner import run_step
from engine.torch_runner import TorchRunner
from engine.weights import draws_on_device, load_weights
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.gguf_file import GGUFFile
from model_files.model_config import config_from_gguf
from model_files.model_source import load_config, resolve_model
from tests.support.gguf_models import write_gguf
from tests.unit.engine.driving import chunk_of

CPU = torch.device("cpu")
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [258, 256],
}


def views(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """The slots of weights that are not quantized."""
    return {name: slot for name, slot in weights.slots().items() if isinstance(slot, torch.Tensor)}


def random_weights(name: str) -> ModelWeights:
    return load_weights(resolve_model(f"random:{name}"), RANDOM_CONFIGS[name], torch.float32, CPU)


@pytest.fixture
def llama_directory(tmp_path: Path) -> Path:
    """random:llama-tiny, written as a Hugging Face directory."""
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    slots = views(random_weights("llama-tiny"))
    save_file({name: view.clone() for name, view in slots.items()}, tmp_path / "model.safetensors")
    return tmp_path


def write_random_gguf(path: Path, name: str, rope_factors: np.ndarray | None = None) -> None:
    """A random model as a GGUF file of architecture llama, with matrices in Q8_0."""
    tensors = {slot: view.numpy() for slot, view in views(random_weights(name)).items()}
    write_gguf(path, RANDOM_CONFIGS[name], tensors, rope_factors=rope_factors)


def logits(model: str) -> np.ndarray:
    runner = TorchRunner(EngineConfig(model=model, dtype="float32", kv_memory_mb=1, num_threads=1))
    chunk = chunk_of(list(range(30)), 0, 30, [0, 1], num_logprobs=20)
    return np.array(sorted(run_step(runner, StepPlan(0, (chunk,))).sampled["a"][0].top_logprobs))


def test_a_directory_gives_the_logits_of_the_saved_weights(llama_directory: Path) -> None:
    np.testing.assert_array_equal(logits(str(llama_directory)), logits("random:llama-tiny"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "holds model.layers.0.self_attn.q_proj.bias"),
        ({"model.norm.weight": torch.zeros(65)}, r"model.norm.weight has shape \[65\], the config needs \[64\]"),
    ],
)
def test_the_error_for_a_wrong_checkpoint_names_the_tensor(
    llama_directory: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    path = llama_directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(path) | change).items() if tensor is not None}
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=message):
        logits(str(llama_directory))


def load(directory: Path, quantization: str = "none") -> ModelWeights:
    source = resolve_model(str(directory))
    return load_weights(source, load_config(source), torch.float32, CPU, quantization)


def test_random_norms_are_about_one_and_random_matrices_keep_the_size_of_their_inputs() -> None:
    """Else the tokens of a random model would say little."""
    for name, view in views(random_weights("llama-tiny")).items():
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, view.shape[-1] ** -0.5)
        assert abs(float(view.mean()) - mean) < deviation, name
        assert 0.7 < float(view.std()) / deviation < 1.4, name


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("change", ["truncated", "overwritten", "replaced", "removed"])
def test_a_file_that_changes_in_place_while_it_is_read_is_refused(
    llama_directory: Path, kind: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte behind the end of a mapped file would end the process by SIGBUS."""
    path, model = llama_directory / f"model.{kind}", llama_directory
    if kind == "gguf":
        model = path
        write_random_gguf(path, "llama-tiny")
    expected, num_filled, fill = load(model), 0, weights._fill

    def disturbed(*tensor: Any) -> None:
        nonlocal num_filled
        fill(*tensor)
        num_filled += 1
        if num_filled > 1:
            return
        if change == "truncated":
            os.truncate(path, 4096)
        elif change == "overwritten":
            path.write_bytes(path.read_bytes())
        elif change == "replaced":
            path.with_name("other").write_bytes(b"another model")
            path.with_name("other").rename(path)
        else:
            path.unlink()

    monkeypatch.setattr(weights, "_fill", disturbed)
    if change in ("replaced", "removed"):
        assert all(map(torch.equal, views(load(model)).values(), views(expected).values()))
    else:
        with pytest.raises(ConfigError, match=rf"model\.{kind} has changed while it was read; rename a complete file"):
            load(model)
        assert num_filled == 1


QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
UNUSABLE = [
    (QUERY, torch.zeros(64 * 64), r"has shape \[4096\], the config needs \[64, 64\]"),
    (QUERY, torch.zeros(64, 64, 1), r"has shape \[64, 64, 1\]"),
    (QUERY, torch.zeros(()), r"has shape \[\]"),
    (QUERY, torch.zeros(0, 64), r"has shape \[0, 64\]"),
    (QUERY, torch.zeros(64, 64, dtype=torch.int8), "is of I8, weights must be of"),
    (NORM, torch.zeros(64, dtype=torch.complex64), "is of C64, weights must be of"),
    (NORM, torch.zeros(64, dtype=torch.float8_e4m3fn), "is of 8 bits and has 1 dimensions, must have 2"),
]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize(("name", "tensor", "message"), UNUSABLE)
def test_every_quantization_refuses_a_tensor_that_is_no_weight(
    llama_directory: Path, name: str, tensor: torch.Tensor, message: str, quantization: str
) -> None:
    path = llama_directory / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        load(llama_directory, quantization)


@pytest.mark.parametrize("quantization", ["none", "int4", "fp8"])
def test_shapes_for_which_no_machine_has_memory_are_refused(llama_directory: Path, quantization: str) -> None:
    huge = {"vocab_size": 1 << 24, "hidden_size": 1 << 24}
    (llama_directory / "config.json").write_text(json.dumps(HF_CONFIG | huge))
    with pytest.raises(ConfigError, match="no memory for weights of the config's shapes"):
        load(llama_directory, quantization)


@pytest.mark.parametrize("shard", ["model-00002-of-00002", "config.json", ".", "/dev/zero", "\0", "\ud800"])
def test_the_error_for_a_shard_that_is_not_there_names_the_file(llama_directory: Path, shard: str) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (llama_directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"cannot read {re.escape(str(llama_directory / shard))}:"):
        logits(str(llama_directory))


def test_a_second_copy_of_a_tied_head_and_derived_buffers_are_ignored(llama_directory: Path) -> None:
    (llama_directory / "config.json").write_text(json.dumps(HF_CONFIG | {"tie_word_embeddings": True}))
    path = llama_directory / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    assert len(logits(str(llama_directory))) == 20


def test_rope_factors_in_a_gguf_are_used(tmp_path: Path) -> None:
    config, path = RANDOM_CONFIGS["llama3-tiny"], tmp_path / "tiny.gguf"
    base = np.array([config.rope_theta ** (-index / 8) for index in range(8)])
    factors = (base / np.array(config.inverse_frequencies())).astype(np.float32)
    assert factors.max() > 1.0
    write_random_gguf(path, "llama3-tiny", factors)
    np.testing.assert_allclose(
        config_from_gguf(GGUFFile(path)).inverse_frequencies(), config.inverse_frequencies(), rtol=1e-5
    )


@pytest.mark.parametrize("length", [3, 20, 700, -1000])
def test_a_damaged_gguf_is_refused_with_a_config_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "llama-tiny")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match="not a usable GGUF file"):
        logits(str(path))


def test_random_weights_are_the_same_every_time_and_differ_between_tensors() -> None:
    first, second = (views(random_weights("qwen3-tiny")) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    gate, up = (first[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert not torch.equal(gate, up)


def test_a_device_draws_the_random_weights_of_large_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU would take a minute for them. All workers must draw the same weights of small models."""
    large, small = resolve_model("random:llama-3.1-8b"), resolve_model("random:llama-tiny")
    cuda = torch.device("cuda:0")
    assert draws_on_device(large, load_config(large), cuda)
    assert not draws_on_device(large, load_config(large), CPU)
    assert not draws_on_device(small, load_config(small), cuda)
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: hopper)
    on_device = ModelSetup.of(EngineConfig(model="random:llama-3.1-8b", device="cuda"), None)
    on_cpu = ModelSetup.of(EngineConfig(model="random:llama-3.1-8b", device="cpu", dtype="bfloat16"), None)
    assert on_device.layout.differences(on_cpu.layout).keys() == {"model"}
    assert on_device.layout.model.endswith(" drawn by sm_90 with 132 processors")
