"""Loads a model's weights from GGUF, safetensors or a seeded generator. All three use Hugging Face names.

Tensors are read, converted and copied into their slots one at a time, so no second copy of the model exists. A
checkpoint must hold exactly the tensors of the config, which is checked before any tensor is read; the error names a
missing, extra or misshapen tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from core.errors import ConfigError
from engine.fp8 import CODES, Fp8Slot
from engine.fp8_checkpoint import SCALES, Fp8Checkpoint
from engine.gguf_groups import exact_groups
from engine.model_weights import ModelWeights, Slot, allocate_weights
from engine.quantization import GroupedRows, MatrixSlot, quantize
from engine.watched_file import WatchedFile
from model_files.fields import read_json
from model_files.gguf_file import GGUFFile
from model_files.model_config import ModelConfig, fp8_block_size
from model_files.model_source import ModelSource, SourceKind

CPU = torch.device("cpu")
# (slot, GGUF type name, uint8 [rows, bytes of a row]) -> whether the slot was filled
Dequantize = Callable[[torch.Tensor, str, np.ndarray], bool]


class WeightSource(Protocol):
    @property
    def files(self) -> Sequence[WatchedFile]:
        """Those that are mapped."""
        ...

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> torch.Size:
        """Of one tensor, without reading it. Raises `ConfigError` for a tensor that holds no weights."""
        ...

    def read(self, name: str, device: torch.device = CPU) -> torch.Tensor:
        """One tensor in any float type, on the CPU. `device` may be where it is wanted, to draw it there."""
        ...

    def copy_to(self, slot: torch.Tensor, name: str) -> None:
        """Copy one tensor into a slot of its shape."""
        ...

    def read_groups(self, name: str, bits: int) -> GroupedRows:
        """One matrix in groups of `bits`: the file's own groups if it has such groups, else quantized."""
        ...


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    dequantize: Dequantize | None = None,
) -> ModelWeights:
    """The weights of `source` in `dtype` on `device`. `dequantize` may fill slots faster than the gguf package.

    Raises `ConfigError` naming a tensor that does not fit.
    """
    try:
        weights = allocate_weights(config, dtype, device, quantization)
    except torch.OutOfMemoryError:
        raise  # of a device, whose caller knows its memory
    except (RuntimeError, OSError, OverflowError) as error:
        raise ConfigError(f"{source.name}: no memory for weights of the config's shapes ({error})") from error
    slots = weights.slots()
    origin = open_weights(source, config, slots, dequantize)
    missing, extra = slots.keys() - origin.names(), origin.names() - slots.keys()
    if missing:
        raise ConfigError(f"{source.name}: the checkpoint lacks {_listed(missing)}")
    if extra:
        raise ConfigError(f"{source.name}: the checkpoint holds {_listed(extra)}, which the model does not use")
    for name, slot in slots.items():
        if (found := origin.shape(name)) != slot.shape:
            raise ConfigError(f"{source.name}: {name} has shape {list(found)}, the config needs {list(slot.shape)}")
    for name, slot in slots.items():
        for file in origin.files:
            file.check()
        _fill(slot, origin, name)
    for file in origin.files:
        file.check()
    return weights


def _fill(slot: Slot, origin: WeightSource, name: str) -> None:
    """Copy a tensor into its slot, whose shape it has."""
    if isinstance(slot, MatrixSlot):
        slot.put(origin.read_groups(name, slot.bits))
    elif isinstance(slot, Fp8Slot):
        codes = origin.read_codes(name) if isinstance(origin, SafetensorsWeights) else None
        if codes is None:
            slot.put(origin.read(name, slot.device))
        else:
            slot.put_codes(*codes)
    else:
        origin.copy_to(slot, name)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def open_weights(
    source: ModelSource, config: ModelConfig, slots: dict[str, Slot], dequantize: Dequantize | None = None
) -> WeightSource:
    """The reader for the kind of `source`."""
    if source.kind is SourceKind.RANDOM:
        return RandomWeights(slots, config)
    assert source.path is not None, f"{source.kind} has no weights"
    if source.kind is SourceKind.GGUF:
        return GGUFWeights(source.path, config, dequantize)
    return SafetensorsWeights(source.path, config)


# ---- safetensors

# Buffers of older checkpoints; the config contains the same values.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$")
_CODES_DTYPE = "F8_E4M3"  # the name of CODES in a safetensors file
_DTYPES = {"F64", "F32", "F16", "BF16", _CODES_DTYPE}


class SafetensorsWeights:
    """One model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict):
                raise ConfigError(f"{index} holds no weight_map")
            shards = sorted({directory / str(shard) for shard in listed.values()})
        else:
            shards = [directory / "model.safetensors"]
        self._files: list[Any] = []
        self._file_of: dict[str, int] = {}
        self.files = [WatchedFile(shard) for shard in shards]
        for shard in shards:
            try:
                opened: Any = safe_open(shard, framework="pt")
            except (OSError, UnicodeError, SafetensorError) as error:
                raise ConfigError(f"cannot read {shard}: {error}") from error
            self._files.append(opened)
            self._file_of |= {name: len(self._files) - 1 for name in opened.keys()}  # noqa: SIM118 (no mapping)
        # A checkpoint may hold a second copy of a tied head.
        tied = {"lm_head.weight"} if config.tie_embeddings else set()
        self._names = {
            name for name in self._file_of if name not in tied and not _DERIVED.match(name) and not SCALES.match(name)
        }
        self._fp8 = Fp8Checkpoint(self._find, fp8_block_size(read_json(directory / "config.json")))

    def names(self) -> set[str]:
        return self._names

    def shape(self, name: str) -> torch.Size:
        described = self._files[self._file_of[name]].get_slice(name)
        if (dtype := described.get_dtype()) not in _DTYPES:
            raise ConfigError(f"{name} is of {dtype}, weights must be of {', '.join(sorted(_DTYPES))}")
        return torch.Size(described.get_shape())

    def read(self, name: str, device: torch.device = CPU) -> torch.Tensor:  # noqa: ARG002
        tensor = self._read(name)
        return self._fp8.dequantized(name, tensor) if tensor.dtype is CODES else tensor

    def read_codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A matrix of codes with a scale for each row; None if the checkpoint has another one."""
        if self._fp8.has_blocks or self._files[self._file_of[name]].get_slice(name).get_dtype() != _CODES_DTYPE:
            return None  # without reading the matrix, which the caller will do
        codes = self._read(name)
        scales = self._fp8.row_scales(name, codes)
        return None if scales is None else (codes, scales)

    def copy_to(self, slot: torch.Tensor, name: str) -> None:
        slot.copy_(self.read(name))

    def read_groups(self, name: str, bits: int) -> GroupedRows:
        return quantize(self.read(name), bits)

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def _find(self, name: str) -> torch.Tensor | None:
        return self._read(name) if name in self._file_of else None


# ---- GGUF

_GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GGUF_DERIVED = {"rope_freqs.weight"}  # the config contains the same values
_ITEMS_AT_ONCE = 1 << 18


class GGUFWeights:
    """A GGUF file's tensors. GGUF orders the rows of architecture `llama`'s q and k for interleaved rope; this class
    restores the half-split order."""

    def __init__(self, path: Path, config: ModelConfig, dequantize: Dequantize | None = None) -> None:
        self.files = [WatchedFile(path)]
        self._file = GGUFFile(path)
        self._dequantize = dequantize
        self._gguf_name = {_hf_name(name): name for name in self._file.tensors if name not in _GGUF_DERIVED}
        self._num_heads: dict[str, int] = {}
        if self._file.fields.text("general.architecture") == "llama":
            self._num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def names(self) -> set[str]:
        return set(self._gguf_name)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file.tensors[self._gguf_name[name]].shape)

    def read(self, name: str, device: torch.device = CPU) -> torch.Tensor:  # noqa: ARG002
        gguf_name = self._gguf_name[name]
        # Copied because the file is mapped read-only and torch has no read-only tensors.
        tensor = torch.from_numpy(self._file.tensor(gguf_name).copy())
        order = self._row_order(gguf_name)
        return tensor if order is None else tensor[order]

    def copy_to(self, slot: torch.Tensor, name: str) -> None:
        gguf_name, shape = self._gguf_name[name], slot.shape
        if len(shape) != 2:
            slot.copy_(self.read(name))
            return
        order = self._row_order(gguf_name)
        if self._dequantize is not None:
            kind, raw = self._file.raw_tensor(gguf_name)
            if self._dequantize(slot, kind, raw if order is None else raw[order.numpy()]):
                return
        # A few rows at a time, so the float32 rows stay in the cache and need no large temporary.
        num_rows = max(1, _ITEMS_AT_ONCE // shape[1])
        for start in range(0, shape[0], num_rows):
            some = slice(start, start + num_rows)
            rows = self._file.tensor(gguf_name, some if order is None else order[some].numpy())
            slot[some] = torch.from_numpy(rows if rows.flags.writeable else rows.copy())

    def read_groups(self, name: str, bits: int) -> GroupedRows:
        gguf_name = self._gguf_name[name]
        rows = exact_groups(self._file, gguf_name, bits)
        if rows is None:
            return quantize(self.read(name), bits)
        order = self._row_order(gguf_name)
        return rows if order is None else rows.rows(order)

    def _row_order(self, gguf_name: str) -> torch.Tensor | None:
        """For each row of the model's matrix, its row in the file. None if the orders are equal. # int64 [rows]"""
        layer = _GGUF_LAYER.fullmatch(gguf_name)
        num_heads = self._num_heads.get(layer[2]) if layer else None
        num_rows = self._file.tensors[gguf_name].shape[0]
        if num_heads is None or num_rows % (2 * num_heads):
            return None
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _hf_name(gguf_name: str) -> str:
    """The Hugging Face name. An unknown tensor keeps its GGUF name, so `load_weights` reports it as extra."""
    layer = _GGUF_LAYER.fullmatch(gguf_name)
    if layer is None:
        return _GGUF_OUTER.get(gguf_name, gguf_name)
    if layer[2] not in _GGUF_INNER:
        return gguf_name
    return f"model.layers.{layer[1]}.{_GGUF_INNER[layer[2]]}.{layer[3]}"


# ---- random


_MAX_DRAWN_BY_CPU = 1 << 29  # weights; a CPU draws about 10^8 a second


def _is_large(config: ModelConfig) -> bool:
    sizes = config.sizes(weight_bytes=1.0, kv_bytes=0.0)
    return sizes.num_layer_weights + sizes.num_head_weights > _MAX_DRAWN_BY_CPU


def draws_on_device(source: ModelSource, config: ModelConfig, device: torch.device) -> bool:
    """Whether the device draws the random weights. Then devices of different types draw different weights."""
    return source.kind is SourceKind.RANDOM and device.type == "cuda" and _is_large(config)


class RandomWeights:
    """Random weights. Each tensor's name seeds its generator, so all workers draw the same weights in any order."""

    files = ()

    def __init__(self, slots: dict[str, Slot], config: ModelConfig) -> None:
        self._shapes = {name: slot.shape for name, slot in slots.items()}
        self._is_large = _is_large(config)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def read(self, name: str, device: torch.device = CPU) -> torch.Tensor:
        """Large models are drawn on `device`."""
        return self._draw(name, device if device.type == "cuda" and self._is_large else CPU)

    def copy_to(self, slot: torch.Tensor, name: str) -> None:
        slot.copy_(self.read(name, slot.device))

    def read_groups(self, name: str, bits: int) -> GroupedRows:
        return quantize(self.read(name), bits)

    def _draw(self, name: str, device: torch.device) -> torch.Tensor:
        """# float32 on `device`"""
        shape = self._shapes[name]
        generator = torch.Generator(device).manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        drawn = torch.randn(shape, generator=generator, device=device)
        if "norm" in name:
            return drawn.mul_(0.1).add_(1.0)
        # This scale keeps outputs as large as inputs, and embeddings small: large ones make a token predict itself.
        return drawn.mul_(shape[-1] ** -0.5)
