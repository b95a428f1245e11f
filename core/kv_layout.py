"""The shape of a KV pool.

A pool is block-major: each block is one contiguous run of bytes, and one descriptor copies it.

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
                             ^ 0 = key, 1 = value

Elements of 8 bits have scales: one for each token, layer, key or value, and head. They lie behind the values of their
block, so a block stays one run of bytes, and its scales move with it.

    block = values [num_layers, 2, num_kv_heads, block_size, head_dim], scales [num_layers, 2, num_kv_heads, block_size]

A pool may hold only a shard: `num_layers` layers from `first_layer`, `num_kv_heads` heads from `first_kv_head`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import xxhash

FLOAT8 = "float8_e4m3"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KVLayout:
    model: str  # fingerprint of the weights; blocks of different models are never exchanged
    dtype: str  # of the values: a key of DTYPE_BYTES
    num_layers: int
    num_kv_heads: int
    block_size: int  # tokens per block
    head_dim: int
    first_layer: int = 0
    first_kv_head: int = 0
    quantization: str = "none"  # of the weights; KV of other quantizations differs like KV of other models

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "block_size", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.has_scales and self.head_dim % 2:
            raise ValueError(f"head_dim must be even beside {FLOAT8}, so that scales are aligned, is {self.head_dim}")

    @property
    def has_scales(self) -> bool:
        return self.dtype == FLOAT8

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * sum(row_bytes for _, row_bytes in self.arrays)

    @property
    def values_bytes(self) -> int:
        """Of a block, without its scales."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def arrays(self) -> tuple[tuple[int, int], ...]:
        """The arrays of a block: first byte in the block, and bytes of one token in one row of the array.

        A row is the tokens of a block in one layer, key or value, and head.
        """
        values = (0, self.head_dim * DTYPE_BYTES[self.dtype])
        return (values, (self.values_bytes, SCALE_BYTES)) if self.has_scales else (values,)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]"""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> int:
        """64 bits that differ if any field differs. Peers compare fingerprints before a transfer."""
        return xxhash.xxh3_64_intdigest("|".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)).encode())

    def differences(self, other: KVLayout) -> dict[str, tuple[object, object]]:
        """The fields that differ, each with (value of `self`, value of `other`)."""
        return {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        }
