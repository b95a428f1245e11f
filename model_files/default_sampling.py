"""The sampling of requests that name none, from generation_config.json: the values that vLLM takes from it."""

from __future__ import annotations

from core.errors import ConfigError, InvalidRequest
from core.request import SamplingParams
from model_files.fields import Fields, optional_file
from model_files.model_source import ModelSource, SourceKind

_FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def default_sampling(source: ModelSource) -> dict[str, float]:
    """Values of fields of `SamplingParams`. Raises `ConfigError` for a value out of range."""
    if source.kind is not SourceKind.HUGGING_FACE or source.path is None:
        return {}
    try:
        found = _read(optional_file(source.path / _FILE))
        SamplingParams(**({"max_tokens": 1} | found))  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ConfigError(f"{_FILE}: {error}; [engine] generation_config = none ignores it") from error
    return found


def _read(fields: Fields) -> dict[str, float]:
    found: dict[str, float] = {name: fields.number(name) for name in _NUMBERS if name in fields}
    if "top_k" in fields:
        found["top_k"] = max(0, fields.integer("top_k", least=-1))  # -1 and 0: all
    if "max_new_tokens" in fields:
        found["max_tokens"] = fields.integer("max_new_tokens")
    return found
