"""The architecture of a model of the Llama family, as data.

One implementation (engine/model.py) computes the whole family. This file describes the differences between its members:
biases on q, k and v (Qwen2), norms on q and k (Qwen3), a separate head size (Qwen3, some Mistrals), rope scaling
(Llama 3), tied embeddings (SmolLM2). `FAMILIES` has what a family fixes. A feature that the implementation lacks raises
ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.cost.model_work import ModelSizes
from core.errors import ConfigError
from model_files.fields import MAX_SIZE, Fields
from model_files.gguf_file import GGUFFile

MAX_LAYERS = 10_000
MAX_HEAD_DIM = 4096  # known models have up to 256; the kernels compute places within a head in 32 bits
MIN_ROPE_FACTOR = 1e-6


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Divides the slow rotations by `factor` (rope type `llama3` of transformers), or with `linear` all rotations."""

    factor: float
    linear: bool = False
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"the model's rope scaling factor must be at least 1, is {self.factor}")
        if not 0.0 <= self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"the model's low_freq_factor of rope scaling must be less than its high_freq_factor, "
                f"are {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None  # from GGUF: one divisor for each of the head_dim / 2 rotations
    qkv_bias: bool = False
    output_bias: bool = False  # of the output projection of the attention
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # not implemented: `usable_context` limits the context to the window

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} must be at least 1, is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model's num_heads must be a multiple of its num_kv_heads, are {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if not 2 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise ConfigError(f"the model's head_dim must be even and from 2 to {MAX_HEAD_DIM}, is {self.head_dim}")
        if self.num_heads * self.head_dim > MAX_SIZE:
            raise ConfigError(
                f"the model's num_heads times head_dim must be at most {MAX_SIZE}, are {self.num_heads} and "
                f"{self.head_dim}"
            )
        factors = self.rope_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(f >= MIN_ROPE_FACTOR for f in factors)
        ):
            raise ConfigError(
                f"the model's rope_freqs must be {self.head_dim // 2} numbers of at least {MIN_ROPE_FACTOR}"
            )

    def usable_context(self, max_context: int) -> int:
        """The context to serve, in tokens: `max_context`, or if that is 0 the context of the model.

        Raises `ConfigError` if the model cannot serve that context.
        """
        if max_context > self.context_length:
            raise ConfigError(
                f"max_context must be at most {self.context_length}, for which the model was trained, is {max_context}"
            )
        context = max_context or self.context_length
        # In a context within the window, every token attends to all tokens before it, as in full attention.
        if self.sliding_window is not None and context > self.sliding_window:
            raise ConfigError(
                f"the model has a sliding window of {self.sliding_window} tokens, which is not supported: "
                f"set max_context to {self.sliding_window} or less"
            )
        return context

    def sizes(self, weight_bytes: float, kv_bytes: float) -> ModelSizes:
        """`weight_bytes` of one weight, `kv_bytes` of the KV of one token."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)  # q, o, and k, v
        mlp = 3 * self.hidden_size * self.intermediate_size  # gate, up, down
        return ModelSizes(
            num_layer_weights=self.num_layers * (attention + mlp),
            num_head_weights=self.vocab_size * self.hidden_size,
            weight_bytes=weight_bytes,
            pair_flop=4.0 * self.num_layers * self.num_heads * self.head_dim,
            kv_bytes=kv_bytes,
        )

    def inverse_frequencies(self) -> list[float]:
        """Radians per position for each of the head_dim / 2 rotations, with the scaling of the model."""
        half = self.head_dim // 2
        base = [self.rope_theta ** (-index / half) for index in range(half)]
        if self.rope_factors is not None:
            return [frequency / factor for frequency, factor in zip(base, self.rope_factors, strict=True)]
        if self.rope_scaling is None:
            return base
        return [_scaled(frequency, self.rope_scaling) for frequency in base]


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    """Divides a slow rotation by the factor and leaves a fast one unchanged; blends the two results in between."""
    if scaling.linear:
        return frequency / scaling.factor
    turns = scaling.original_context * frequency / (2 * math.pi)  # full turns within the original context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - share) * frequency / scaling.factor + share * frequency


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of a family differ from Llama's. What only some models of a family have, their files say."""

    qkv_bias: bool = False  # q, k and v always have biases
    qk_norm: bool = False  # q and k have norms
    output_bias: bool = False  # config.json: `attention_bias` also adds a bias to the output projection
    sliding_window: bool = True  # config.json: `sliding_window` counts ...
    needs_use_sliding_window: bool = False  # ... with `use_sliding_window` only
    in_gguf: bool = True  # GGUF files have an architecture of this name


FAMILIES = {  # by model_type of config.json, and by general.architecture of GGUF
    "llama": Family(output_bias=True, sliding_window=False),
    "mistral": Family(in_gguf=False),  # as llama
    "qwen2": Family(qkv_bias=True, needs_use_sliding_window=True),
    "qwen3": Family(qk_norm=True, output_bias=True, needs_use_sliding_window=True),
}


# ---- config.json of Hugging Face


def fp8_block_size(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that have one scale in a checkpoint of 8-bit floats; None if a row or a whole matrix has one.

    Raises `ConfigError` for every other format of quantized weights.
    """
    found = raw.get("quantization_config") or {}
    method = found.get("quant_method") if isinstance(found, Mapping) else "unknown"
    if found and method != "fp8" and (method != "compressed-tensors" or found.get("format") != "float-quantized"):
        raise ConfigError(
            f"config.json: quantization_config of {method!r} is not supported: quantized safetensors must be of "
            "8-bit floats (fp8, or float-quantized of compressed-tensors); for other formats use a GGUF file"
        )
    match found.get("weight_block_size"):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise ConfigError(f"config.json: weight_block_size must be two sizes, is {other!r}")


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Convert a config.json of transformers 4 or 5. Raises `ConfigError` for a feature that is not supported."""
    fields = Fields(raw, "config.json")
    name = fields.text("model_type", "")
    if name not in FAMILIES:
        raise ConfigError(f"model_type {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if fields.text("hidden_act", "silu") != "silu" or raw.get("mlp_bias"):
        raise ConfigError("config.json: hidden_act must be silu and mlp_bias false; no other feed-forward is supported")
    fp8_block_size(raw)  # refuses other formats
    family, attention_bias = FAMILIES[name], fields.flag("attention_bias")
    rope_theta, scaling = _hf_rope(fields)
    hidden_size = fields.integer("hidden_size", most=MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", most=MAX_SIZE)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", most=MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", most=MAX_SIZE),
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, most=MAX_SIZE),
        head_dim=fields.integer("head_dim", hidden_size // num_heads, most=MAX_SIZE),
        context_length=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=family.output_bias and attention_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=_hf_sliding_window(fields, family),
    )


def _hf_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """(base, scaling). transformers 5 writes both to `rope_parameters`; 4 writes `rope_theta` and `rope_scaling`."""
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    rope = Fields({**older.values, **newer.values}, (newer if newer.values else older).origin)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0, least=1.0), least=1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor must be 1; partial rotary embeddings are not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(factor=rope.number("factor"), linear=True)
    if kind == "llama3":
        return theta, RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings"),
        )
    raise ConfigError(f"rope type {kind!r} is not supported; supported: default, linear, llama3")


def _hf_sliding_window(fields: Fields, family: Family) -> int | None:
    if family.needs_use_sliding_window and not fields.flag("use_sliding_window"):
        return None
    if not family.sliding_window or "sliding_window" not in fields:
        return None
    return fields.integer("sliding_window")


# ---- GGUF metadata

_GGUF_FAMILIES = {name: family for name, family in FAMILIES.items() if family.in_gguf}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Convert GGUF metadata and tensor names. Raises `ConfigError` for a feature that is not supported."""
    fields = file.fields
    family = fields.text("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise ConfigError(
            f"{file.path}: architecture {family!r} is not supported; supported: {', '.join(_GGUF_FAMILIES)}"
        )
    layers = _GGUF_FAMILIES[family]
    vocab_size, hidden_size = file.matrix_shape("token_embd.weight")
    num_heads = fields.integer(f"{family}.attention.head_count", most=MAX_SIZE)
    if file.metadata.get(f"{family}.expert_count"):
        raise ConfigError(f"{file.path}: mixtures of experts are not supported")
    head_dim = fields.integer(f"{family}.attention.key_length", hidden_size // num_heads, most=MAX_SIZE)
    if fields.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: partial rotary embeddings are not supported")
    window = f"{family}.attention.sliding_window"
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{family}.feed_forward_length", most=MAX_SIZE),
        num_layers=fields.integer(f"{family}.block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{family}.attention.head_count_kv", num_heads, most=MAX_SIZE),
        head_dim=head_dim,
        context_length=fields.integer(f"{family}.context_length"),
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{family}.rope.freq_base", 10_000.0, least=1.0),
        rope_scaling=_gguf_rope_scaling(file, family),
        rope_factors=_gguf_rope_factors(file),
        qkv_bias=layers.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=layers.qk_norm,
        tie_embeddings="output.weight" not in file.tensors,
        sliding_window=fields.integer(window) if window in fields else None,
    )


def _gguf_rope_scaling(file: GGUFFile, family: str) -> RopeScaling | None:
    kind = file.fields.text(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(factor=file.fields.number(f"{family}.rope.scaling.factor"), linear=True)
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear")


def _gguf_rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    if "rope_freqs.weight" not in file.tensors:
        return None
    return tuple(file.tensor("rope_freqs.weight").flatten().tolist())
