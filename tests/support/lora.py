"""Random LoRA adapters in PEFT's format, strong enough to change the tokens of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def write_adapters(directory: Path, model: Path, names: Sequence[str]) -> tuple[str, ...]:
    """`[vllm] adapters` with an adapter for each name. `model` is a directory in Hugging Face format."""
    return tuple(f"{name}={_write(directory / name, model, seed)}" for seed, name in enumerate(names))


def _write(directory: Path, model: Path, seed: int) -> Path:
    config = json.loads((model / "config.json").read_text())
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, num_out in (("q", num_heads), ("v", config["num_key_value_heads"])):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            num_rows = num_out * (hidden // num_heads)
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(num_rows, RANK, generator=generator) / RANK**0.5
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
