"""Names of KV blocks on disk.

    name of block i = BLAKE2b-256(name of block i - 1, tokens of block i)
    name before block 0 = BLAKE2b-256(identity, cache salt)

The identity stands for every byte of the weights, how the model computes, the layout of the pool and the format of the
file. A file outlives its process, so the samples of weights in the layout would not do. So two blocks have
one name only if they hold the same KV for the same salt. The prefix cache compares tokens, because its hashes can be
forged (docs/adr/0019). A name cannot, so equal names need no comparison, and no token lies on disk.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b

from core.kv_layout import KVLayout

NAME_BYTES = 32
FORMAT_VERSION = 2  # of the slots: another version is another identity
KV_VERSION = 1  # of the engine: raise it when the same weights and tokens give other KV


def identity_of(layout: KVLayout, model: str = "") -> bytes:
    """NAME_BYTES that differ if any field of the layout differs, or `model`: the weights and how they are computed."""
    text = "|".join(f"{field.name}={getattr(layout, field.name)}" for field in fields(layout))
    return _digest(b"tandem-identity", f"{FORMAT_VERSION}|{KV_VERSION}|{model}|{text}".encode())


def root_name(identity: bytes, cache_salt: str) -> bytes:
    """The name before the first block of every prompt with this salt."""
    return _digest(b"tandem-root", identity + cache_salt.encode())


def chain_name(parent: bytes, token_bytes: bytes) -> bytes:
    """The name of a block behind the one named `parent`. `token_bytes`: the block's tokens as little-endian u32."""
    return _digest(b"tandem-block", parent + token_bytes)


def _digest(purpose: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=NAME_BYTES, person=purpose).digest()
