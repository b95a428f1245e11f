"""Small random models of every supported family, made by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Family -> the prefix of transformers' classes, and what differs from SIZES.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "attention_bias": True},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm2": ("Llama", {"tie_word_embeddings": True}),
}


def random_model(prefix: str, sizes: Mapping[str, object], seed: int) -> Any:
    """The causal language model of the classes with this prefix, with random weights."""
    import transformers  # takes two seconds, which every process that collects tests would pay

    config_type, model_type = getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = model_type(config_type(**sizes)).eval()
    with torch.no_grad():  # norms and biases of ones and zeros would hide a missing norm or bias
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_reference(family: str, directory: Path, sizes: dict[str, object] | None = None, **saving: object) -> Any:
    """A random model of the family, saved in the directory. `sizes` replaces sizes of the config."""
    prefix, differences = FAMILIES[family]
    reference = random_model(prefix, SIZES | differences | (sizes or {}), seed=7)
    reference.save_pretrained(directory, **saving)
    return reference


def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of a prompt, whatever tokens they are."""
    generated = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = generated[0, len(prompt) :].tolist()
    return found
