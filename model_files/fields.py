"""Reads typed values from the metadata of a model: config.json, tokenizer_config.json, or the header of a GGUF file.

Files come from anywhere, so the type and the range of each value are checked. A missing key and a null mean the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core.errors import ConfigError

MAX_SIZE = 1 << 24  # rows or columns of a matrix; the largest known vocabulary has 2^18
MAX_INTEGER = (1 << 31) - 1
_SHOWN_CHARACTERS = 60  # of a wrong value, in an error

Item = TypeVar("Item", str, int)


@dataclass(frozen=True, slots=True)
class Fields:
    """Every method may raise `ConfigError`, which names the key and its valid values. A missing key without a default
    is an error."""

    values: Mapping[str, Any]
    origin: str  # name of the file, for errors: "config.json", or a path

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        return value if isinstance(value, str) else self._refuse(key, value, "a string")

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self else None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        return value if isinstance(value, bool) else self._refuse(key, value, "true or false")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_INTEGER) -> int:
        return self._integer(key, self._value(key, default), least, most)

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= MAX_INTEGER or not math.isfinite(value):
            self._refuse(key, value, f"a number from {least:g} to {MAX_INTEGER}")
        return float(value)

    def list_of(self, kind: type[Item], key: str, default: list[Item] | None = None) -> list[Item]:
        value = self._value(key, default)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self._refuse(key, value, f"a list of {'strings' if kind is str else 'whole numbers'}")
        items: list[Item] = value
        return items

    def token_ids(self, key: str, num_tokens: int) -> list[int]:
        """The value as a list of ids below `num_tokens`, also if it is a single id; empty if the key is missing."""
        value = self.values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return [self._integer(key, item, 0, num_tokens - 1) for item in listed]

    def section(self, key: str) -> Fields:
        """The values of an object; empty if the key is missing."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            self._refuse(key, value, "an object")
        return Fields(value, f"{self.origin}'s {key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.origin} lacks {key}, which is required")
        return value

    def _integer(self, key: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            self._refuse(key, value, f"a whole number from {least} to {most}")
        return int(value)

    def _refuse(self, key: str, value: Any, wanted: str) -> Any:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"{shown[:_SHOWN_CHARACTERS]}..."
        raise ConfigError(f"{self.origin}: {key} is {shown}, must be {wanted}")


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file. Raises `ConfigError` if the file does not contain one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a JSON object")
    return content


def optional_file(path: Path) -> Fields:
    """The values of a JSON file; none if the file is missing. Raises `ConfigError` as `read_json`."""
    return Fields(read_json(path) if path.is_file() else {}, path.name)
