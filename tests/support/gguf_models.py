"""GGUF files of whole models, in the form of llama.cpp's converter. The gguf package names the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from model_files.model_config import ModelConfig

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
WRITTEN_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
# Types that the package reads but does not write: random bytes, with these values at the offsets of a block's scales.
READ_TYPES = {"Q4_K": {0: 2e-4, 2: 1.5e-3}, "Q5_K": {0: 1e-4, 2: 1.5e-3}, "Q6_K": {208: 1e-4}}


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix encoded as a type: the nearest codes, or random bytes if the package cannot write the type."""
    if kind not in READ_TYPES:
        return quantize(values, gguf.GGMLQuantizationType[kind])
    items, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // items, num_bytes), dtype=np.uint8)
    for place, scale in READ_TYPES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    kind: str = "Q8_0",
    family: str = "llama",
    rope_factors: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """`tensors` by their names in Hugging Face's files. Returns the matrices that the file means, by the same names."""
    writer, type_of_matrices = gguf.GGUFWriter(path, family), gguf.GGMLQuantizationType[kind]
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_eos_token_id(2)
    if config.head_dim != config.hidden_size // config.num_heads:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    names, meant = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_layers), {}
    for name, values in tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if values.ndim == 1:
            writer.add_tensor(gguf_name, values.copy())
            continue
        raw = encoded(values, kind)
        meant[name] = dequantize(raw, type_of_matrices).copy()
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # their rows are interleaved
            num_heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            raw = raw.reshape(num_heads, 2, -1, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(gguf_name, raw, raw_dtype=type_of_matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
