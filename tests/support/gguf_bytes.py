"""GGUF files written byte by byte. A test can write invalid files; the gguf package writes only valid ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_U32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 6, 7, 8, 9, 10, 11
_ALIGNMENT = 32
Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


@dataclass(frozen=True, slots=True)
class TensorBytes:
    shape: tuple[int, ...]  # outermost first
    ggml_type: int
    content: bytes


def gguf_bytes(metadata: Mapping[str, Value], tensors: Mapping[str, TensorBytes]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, content = _typed(value)
        parts += [_string(key), struct.pack("<I", kind), content]
    offset = 0
    for name, tensor in tensors.items():
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += [_string(name), dimensions, struct.pack("<IQ", tensor.ggml_type, offset)]
        offset += len(_padded(tensor.content))
    return b"".join([_padded(b"".join(parts)), *(_padded(tensor.content) for tensor in tensors.values())])


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _ALIGNMENT)


def _typed(value: Value) -> tuple[int, bytes]:
    """(value type, its bytes)"""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        if value < 0:
            return _I64, struct.pack("<q", value)
        return (_U32, struct.pack("<I", value)) if value < 1 << 32 else (_U64, struct.pack("<Q", value))
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _string(value)
    if all(isinstance(item, str) for item in value):
        items = [_string(str(item)) for item in value]
        return _ARRAY, struct.pack("<IQ", _STRING, len(items)) + b"".join(items)
    kind, code = (_F32, "f") if any(isinstance(item, float) for item in value) else (_I64, "q")
    return _ARRAY, struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value)
