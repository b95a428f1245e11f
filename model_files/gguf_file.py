"""Reads a GGUF file from a memory map.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | value type u32 | value          (string = length u64 | UTF-8 bytes)
    tensors:   name string | dimension count u32 | dimensions u64 each, innermost first | type u32 | offset u64
    padding to general.alignment, then the bytes of the tensors

This module parses the header without the gguf package, because the router reads headers too and must start fast. Only
workers dequantize, with that package and numpy. Every access is bounds-checked: a damaged file raises ConfigError.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from model_files.fields import Fields

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_ITEMS = 4_000_000
# metadata value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in numpy and torch
    ggml_type: int
    offset: int  # of the first byte, from the start of the file


class GGUFFile:
    """Metadata and tensors of one memory-mapped file. Raises `ConfigError` if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise self._damaged(f"at byte {self._position}: {error}") from error

    @property
    def fields(self) -> Fields:
        """The metadata. Each read checks the value."""
        return Fields(self.metadata, str(self.path))

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """(rows, columns) of a matrix. Raises `ConfigError` if the tensor is missing or is not a matrix."""
        entry = self.tensors.get(name)
        if entry is None:
            raise self._damaged(f"tensor {name} is missing")
        if len(entry.shape) != 2:
            raise self._damaged(f"tensor {name} has {len(entry.shape)} dimensions, must have 2")
        return entry.shape[0], entry.shape[1]

    def raw_tensor(self, name: str) -> tuple[str, np.ndarray]:
        """(name of the tensor's type, its bytes in the file, read-only). Raises `ConfigError` as `tensor` does.

        # -> uint8 [..., bytes of a row]
        """
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entry = self.tensors[name]
        try:
            ggml_type = GGMLQuantizationType(entry.ggml_type)
            items_per_group, bytes_per_group = GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError) as error:
            raise self._damaged(f"tensor {name} has the unknown type {entry.ggml_type}") from error
        if entry.shape[-1] % items_per_group:
            raise self._damaged(
                f"tensor {name} has rows of {entry.shape[-1]} numbers, must have a multiple of {items_per_group} "
                f"({ggml_type.name})"
            )
        row_bytes = entry.shape[-1] // items_per_group * bytes_per_group
        num_bytes = prod(entry.shape[:-1]) * row_bytes
        if entry.offset + num_bytes > len(self._bytes):
            raise self._damaged(f"tensor {name} ends after the end of the file")
        raw = np.frombuffer(self._bytes, np.uint8, num_bytes, entry.offset)
        return ggml_type.name, raw.reshape(*entry.shape[:-1], row_bytes)

    def tensor(self, name: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """One tensor, or some of its rows, dequantized to float32. Raises `ConfigError` if the tensor is damaged."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind, raw = self.raw_tensor(name)
        raw = raw[rows]
        if kind == "F32":
            return raw.view(np.float32)
        if kind == "F16":
            return raw.view(np.float16).astype(np.float32)
        try:
            return dequantize(raw, GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise ConfigError(f"{self.path}: tensor {name}: {kind} cannot be dequantized") from error

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is not a usable GGUF file: {what}; download or convert the file again")

    def _parse(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise self._damaged("the file does not start with GGUF")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self._damaged(f"the version must be one of {_VERSIONS}, is {version}")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment must be a whole number of at least 1, is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, ggml_type, offset in entries:
            # Every type takes at least one bit for a number. A larger shape is wrong and could not be allocated.
            if not 1 <= prod(shape) <= 8 * len(self._bytes):
                raise self._damaged(f"tensor {name} has the shape {shape}, for which the file is too small")
            self.tensors[name] = TensorEntry(name, shape, ggml_type, data_start + offset)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._position + length
        if end > len(self._bytes):
            raise self._damaged(f"the string at byte {self._position} ends after the end of the file")
        text = self._bytes[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _strings(self, count: int) -> list[str]:
        """As many calls of `_string`, but five times faster: a vocabulary has a hundred thousand strings."""
        read_length, content = struct.Struct("<Q").unpack_from, self._bytes
        position, size, strings = self._position, len(content), []
        for _ in range(count):
            start = position + 8
            position = start + read_length(content, position)[0]
            if position > size:
                raise self._damaged(f"the string at byte {start} ends after the end of the file")
            strings.append(content[start:position].decode("utf-8"))
        self._position = position
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, count = self._scalar("I"), self._scalar("Q")
        if count > _MAX_ARRAY_ITEMS:
            raise self._damaged(
                f"the array at byte {self._position} must have at most {_MAX_ARRAY_ITEMS} items, has {count}"
            )
        if item_kind == _STRING:
            return self._strings(count)
        code = f"<{count}{_SCALARS[item_kind]}"
        values = list(struct.unpack_from(code, self._bytes, self._position))
        self._position += struct.calcsize(code)
        return values

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= 4:
            raise self._damaged(f"tensor {name} must have 1 to 4 dimensions, has {num_dimensions}")
        shape = tuple(reversed([self._scalar("Q") for _ in range(num_dimensions)]))
        return name, shape, self._scalar("I"), self._scalar("Q")
