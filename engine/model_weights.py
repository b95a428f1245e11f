"""The tensors of a model, with matrices fused for fewer products, and the named slots that a checkpoint fills.

One matrix holds q, k and v, another holds gate and up, so a layer has four products instead of seven. A slot is a view
of the rows of one checkpoint tensor, under its Hugging Face name. The loader copies tensors into slots and does not
depend on the fusion. The slots of a quantized matrix take codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.fp8 import FP8, Fp8Matrix, Fp8Slot
from engine.host_memory import HugePages
from engine.linear import Matrix
from engine.quantization import BITS, MatrixSlot, QuantizedMatrix
from model_files.model_config import ModelConfig

Slot = torch.Tensor | MatrixSlot | Fp8Slot
NewMatrix = Callable[..., Matrix]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [(Hq + 2 * Hkv) * D, hidden]
    qkv_bias: torch.Tensor | None  # [(Hq + 2 * Hkv) * D]
    qk_norm: torch.Tensor | None  # [2, D] q's, then k's
    output: Matrix  # [hidden, Hq * D]
    output_bias: torch.Tensor | None  # [hidden]
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    config: ModelConfig
    embedding: Matrix  # [vocab, hidden]
    layers: list[LayerWeights]  # `Model` removes them one by one
    final_norm: torch.Tensor  # [hidden]
    head: Matrix  # [vocab, hidden]; the same object as `embedding` if tied

    def slots(self) -> dict[str, Slot]:
        """A slot for every tensor that a checkpoint must hold, by its Hugging Face name."""
        (embedding,) = _row_slots(self.embedding, [self.config.vocab_size])
        slots = {"model.embed_tokens.weight": embedding, "model.norm.weight": self.final_norm}
        if not self.config.tie_embeddings:
            (slots["lm_head.weight"],) = _row_slots(self.head, [self.config.vocab_size])
        for index, layer in enumerate(self.layers):
            for name, view in _layer_slots(self.config, layer).items():
                slots[f"model.layers.{index}.{name}"] = view
        return slots


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: str = "none"
) -> ModelWeights:
    """Uninitialized weights of the config's shapes, with matrices in `quantization` (none, int8, int4 or fp8).

    The embedding and the head have at least 8 bits, and stay in `dtype` beside fp8: rounding errors do most harm in a
    token's row and logit.
    """
    memory = HugePages()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(num_rows: int, num_columns: int, least_bits: int = 0) -> Matrix:
        if quantization == "none" or (quantization == FP8 and least_bits):
            return empty(num_rows, num_columns)
        if quantization == FP8:
            return Fp8Matrix(num_rows, num_columns, dtype, device)
        return QuantizedMatrix(num_rows, num_columns, max(least_bits, BITS[quantization]), dtype, memory)

    embedding = matrix(config.vocab_size, config.hidden_size, 8)
    return ModelWeights(
        config=config,
        embedding=embedding,
        layers=[_allocate_layer(config, empty, matrix) for _ in range(config.num_layers)],
        final_norm=empty(config.hidden_size),
        head=embedding if config.tie_embeddings else matrix(config.vocab_size, config.hidden_size, 8),
    )


def _allocate_layer(config: ModelConfig, empty: Callable[..., torch.Tensor], matrix: NewMatrix) -> LayerWeights:
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=matrix(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if config.qkv_bias else None,
        qk_norm=empty(2, config.head_dim) if config.qk_norm else None,
        output=matrix(hidden, query_size),
        output_bias=empty(hidden) if config.output_bias else None,
        feed_forward_norm=empty(hidden),
        gate_up=matrix(2 * config.intermediate_size, hidden),
        down=matrix(hidden, config.intermediate_size),
    )


def _row_slots(matrix: Matrix, sizes: Sequence[int]) -> Sequence[Slot]:
    """One slot for each run of rows."""
    if isinstance(matrix, torch.Tensor):
        return torch.split(matrix, list(sizes))
    starts = [0, *itertools.accumulate(sizes)]
    return [matrix.slot(start, size) for start, size in zip(starts, sizes, strict=False)]


def _layer_slots(config: ModelConfig, layer: LayerWeights) -> dict[str, Slot]:
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [query_size, kv_size, kv_size]
    query, key, value = _row_slots(layer.qkv, sizes)
    gate, up = _row_slots(layer.gate_up, [config.intermediate_size] * 2)
    (output,) = _row_slots(layer.output, [config.hidden_size])
    (down,) = _row_slots(layer.down, [config.hidden_size])
    slots: dict[str, Slot] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": output,
        "post_attention_layernorm.weight": layer.feed_forward_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }
    if layer.qkv_bias is not None:
        for name, view in zip("qkv", torch.split(layer.qkv_bias, sizes), strict=True):
            slots[f"self_attn.{name}_proj.bias"] = view
    if layer.output_bias is not None:
        slots["self_attn.o_proj.bias"] = layer.output_bias
    if layer.qk_norm is not None:
        slots["self_attn.q_norm.weight"], slots["self_attn.k_norm.weight"] = layer.qk_norm
    return slots
