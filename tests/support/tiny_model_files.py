"""The smallest valid model files: a GGUF header, and the JSON files of a directory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.support.gguf_bytes import TensorBytes, Value, gguf_bytes

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "an", "in", "<s>", "</s>"]
BOS_ID, EOS_ID = 258, 259
HIDDEN_SIZE = 64
F32, Q8_0 = 0, 8
GGUF_METADATA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN_SIZE,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": BOS_ID,
    "tokenizer.ggml.eos_token_id": EOS_ID,
    "tokenizer.ggml.eot_token_id": EOS_ID,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "tokenizer.ggml.merges": ["a n", "i n"],
    "tokenizer.ggml.token_type": [1] * 258 + [3, 3],
    "tokenizer.ggml.tokens": TOKENS,
}
GGUF_TENSORS = {
    "token_embd.weight": TensorBytes((len(TOKENS), HIDDEN_SIZE), Q8_0, bytes(len(TOKENS) * HIDDEN_SIZE // 32 * 34)),
    "rope_freqs.weight": TensorBytes((8,), F32, struct.pack("<8f", *[1.0] * 8)),
}


def write_gguf_header(
    path: Path, metadata: dict[str, Value] | None = None, tensors: dict[str, TensorBytes] | None = None
) -> str:
    """Write the valid file with some keys and tensors changed. Returns its path as a model spec."""
    path.write_bytes(gguf_bytes(GGUF_METADATA | (metadata or {}), GGUF_TENSORS | (tensors or {})))
    return str(path)


CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID],
}


def _tokenizer() -> dict[str, Any]:
    tokenizer = Tokenizer(BPE(vocab={text: index for index, text in enumerate(TOKENS)}, merges=[("a", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


DIRECTORY: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
    "tokenizer.json": _tokenizer(),
    "tokenizer_config.json": {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}],
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
    },
}


def write_directory(path: Path, **changes: dict[str, Any]) -> str:
    """Write the valid files; `config={...}` changes keys of config.json. Returns the path as a model spec."""
    path.mkdir(exist_ok=True)
    for name, content in DIRECTORY.items():
        (path / name).write_text(json.dumps(content | changes.get(name.removesuffix(".json"), {})))
    return str(path)
