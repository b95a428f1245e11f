"""The tensors of a model, fused as they are multiplied, and the named slots a checkpoint is loaded into.

q, k and v lie in one matrix, gate and up in another, so that each layer multiplies four times instead of seven. A slot
is a view of such a tensor under the name a Hugging Face checkpoint gives it; whoever loads copies into slots, and
knows nothing of the fusing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(Hq + 2 * Hkv) * D, hidden]
    qkv_bias: torch.Tensor | None  # [(Hq + 2 * Hkv) * D]
    qk_norm: torch.Tensor | None  # [2, D] q's, then k's
    output: torch.Tensor  # [hidden, Hq * D]
    output_bias: torch.Tensor | None  # [hidden]
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    config: ModelConfig
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]  # emptied by the model that is made of them
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where they are tied

    def slots(self) -> dict[str, torch.Tensor]:
        """Every tensor a checkpoint must hold, by its Hugging Face name, as a view to copy into."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not self.config.tie_embeddings:
            slots["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for name, view in _layer_slots(self.config, layer).items():
                slots[f"model.layers.{index}.{name}"] = view
        return slots


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Uninitialized weights of the right shapes."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = empty(config.vocab_size, config.hidden_size)
    return ModelWeights(
        config=config,
        embedding=embedding,
        layers=[_allocate_layer(config, empty) for _ in range(config.num_layers)],
        final_norm=empty(config.hidden_size),
        head=embedding if config.tie_embeddings else empty(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, empty: Callable[..., torch.Tensor]) -> LayerWeights:
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if config.qkv_bias else None,
        qk_norm=empty(2, config.head_dim) if config.qk_norm else None,
        output=empty(hidden, query_size),
        output_bias=empty(hidden) if config.output_bias else None,
        feed_forward_norm=empty(hidden),
        gate_up=empty(2 * config.intermediate_size, hidden),
        down=empty(hidden, config.intermediate_size),
    )


def _layer_slots(config: ModelConfig, layer: LayerWeights) -> dict[str, torch.Tensor]:
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [query_size, kv_size, kv_size]
    query, key, value = torch.split(layer.qkv, sizes)
    gate, up = layer.gate_up.chunk(2)
    slots = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": layer.output,
        "post_attention_layernorm.weight": layer.feed_forward_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
    }
    if layer.qkv_bias is not None:
        for name, view in zip("qkv", torch.split(layer.qkv_bias, sizes), strict=True):
            slots[f"self_attn.{name}_proj.bias"] = view
    if layer.output_bias is not None:
        slots["self_attn.o_proj.bias"] = layer.output_bias
    if layer.qk_norm is not None:
        slots["self_attn.q_norm.weight"], slots["self_attn.k_norm.weight"] = layer.qk_norm
    return slots
