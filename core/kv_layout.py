"""The shape of a KV pool.

A pool is block-major: each block is one contiguous run of bytes, and one descriptor copies it.

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
                             ^ 0 = key, 1 = value

A pool may hold only a shard: `num_layers` layers from `first_layer`, `num_kv_heads` heads from `first_kv_head`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    model: str  # fingerprint of the weights; blocks of different models are never exchanged
    dtype: str  # a key of DTYPE_BYTES
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

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

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
