"""Models in the format of Hugging Face, as transformers and vLLM read them.

vLLM runs a model without a file of weights: it draws the weights itself (`--load-format dummy`), the same in every
process. As in the tokenizer of Tandem's random models, the first 256 ids are bytes, then come special tokens, and the
text of every other id is `<id>`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from model_files.model_config import ModelConfig

FIRST_NAMED_ID = 258
SPECIAL_IDS = {"<|begin|>": 256, "<|end|>": 257}
RANDOM_WEIGHTS = ("--load-format", "dummy")


def write_model(directory: Path, config: ModelConfig) -> None:
    """`config`: of the Llama family."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        "config.json": hf_config(config)
        | {"bos_token_id": SPECIAL_IDS["<|begin|>"], "eos_token_id": SPECIAL_IDS["<|end|>"]},
        "tokenizer.json": _tokenizer(config.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>",
        },
    }  # fmt: skip
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """A byte-level BPE without merges, in the format of Hugging Face's tokenizers."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": token_id, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, token_id in SPECIAL_IDS.items()
    ]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token_id for token_id, character in enumerate(bytes_)} | SPECIAL_IDS
    vocab |= {f"<{token_id}>": token_id for token_id in range(FIRST_NAMED_ID, vocab_size)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama, without the ids of special tokens, which `ModelConfig` does not have."""
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
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
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return found
