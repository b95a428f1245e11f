"""Models without files: random weights for tests and benchmarks, and the fake model.

All of them use the byte tokenizer: ids 0 to 255 are bytes, then come the special tokens below. The text of every other
id of a larger vocabulary is `<id>`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model_files.model_config import ModelConfig, RopeScaling

BYTE_SPECIAL_TOKENS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
BYTE_BOS_ID = BYTE_SPECIAL_TOKENS["<|endoftext|>"]
BYTE_EOS_ID = BYTE_SPECIAL_TOKENS["<|im_end|>"]
BYTE_VOCAB_SIZE = 256 + len(BYTE_SPECIAL_TOKENS)


def _tiny(**differences: object) -> ModelConfig:
    """Two small layers with the features of a large model: grouped heads, many blocks of context, an odd vocabulary."""
    sizes: dict[str, object] = {
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "context_length": 2048,
    }
    return ModelConfig(**(sizes | differences))  # type: ignore[arg-type]


RANDOM_CONFIGS = {
    "llama-tiny": _tiny(num_kv_heads=4),
    "llama3-tiny": _tiny(rope_theta=500_000.0, rope_scaling=RopeScaling(factor=8.0, original_context=256)),
    "mistral-tiny": _tiny(head_dim=32, rope_theta=1_000_000.0),
    "qwen2-tiny": _tiny(qkv_bias=True, rms_norm_eps=1e-6, rope_theta=1_000_000.0),
    "qwen3-tiny": _tiny(qk_norm=True, head_dim=32, rms_norm_eps=1e-6, rope_theta=1_000_000.0),
    "smollm2-tiny": _tiny(tie_embeddings=True, num_heads=3, num_kv_heads=1, hidden_size=48),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        rope_theta=100_000.0,
        tie_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0),
    ),
}


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Shape of the KV pool of the fake runner, and its limits."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    max_blocks: int  # a larger pool would only take longer to allocate
    step_s: float = 0.0  # what each step takes beside its computing, so that streams last on every machine


_FAKE_TINY = FakeConfig(num_layers=2, num_kv_heads=2, head_dim=4, context_length=8192, max_blocks=4096)
FAKE_CONFIGS = {
    "tiny": _FAKE_TINY,
    "slow": replace(_FAKE_TINY, step_s=0.002),
    "wide": FakeConfig(num_layers=8, num_kv_heads=4, head_dim=64, context_length=32_768, max_blocks=4096),
}
