"""Writes a model that Tandem reads from GGUF as a Hugging Face directory, for programs that read nothing else.

    config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json

`python -m benchmarks.hf_directory MODEL DIRECTORY`. The weights are those of our own loader: dequantized, rope undone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.weights import load_weights
from model_files.gguf_file import GGUFFile
from model_files.model_config import ModelConfig
from model_files.model_source import SourceKind, load_config, resolve_model
from text.tokenizer_files import from_gguf


def hf_config(config: ModelConfig, file: GGUFFile) -> dict[str, Any]:
    """What transformers asks of a Llama."""
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    told = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    special = {name: token_id for name, token_id in told.items() if token_id is not None}
    return special | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "torch_dtype": "bfloat16",
    }


def write(model: str, directory: Path) -> Path:
    """`directory`, complete: a second call does nothing. Raises `ValueError` for a model that is no GGUF file."""
    if (directory / "config.json").is_file():
        return directory
    source = resolve_model(model)
    if source.kind is not SourceKind.GGUF or source.path is None:
        raise ValueError(f"{model} is no GGUF file")
    directory.mkdir(parents=True, exist_ok=True)
    config, file = load_config(source), GGUFFile(source.path)
    slots = load_weights(source, config, torch.bfloat16, torch.device("cpu")).slots()
    # Slots share memory, which the format has not; each is a tensor, since nothing was quantized.
    tensors = {name: slot.clone() for name, slot in slots.items() if isinstance(slot, torch.Tensor)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = from_gguf(source)
    tokenizer.tokenizer.save(str(directory / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    _write_json(directory / "tokenizer_config.json", options | dict(tokenizer.template_tokens))
    content = hf_config(config, file)
    _write_json(directory / "generation_config.json", {key: content[key] for key in content if key.endswith("_id")})
    _write_json(directory / "config.json", content)  # the last one: it says that all is there
    return directory


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of the catalogue or a .gguf file")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(write(arguments.model, arguments.directory))
