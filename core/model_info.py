"""The properties of a model that matter outside the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.errors import ModelNotFound, quoted


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    fingerprint: str  # of the weights; KVLayout.model
    vocab_size: int
    context_length: int  # in tokens, prompt and output together
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    adapters: tuple[str, ...] = ()  # names that requests may give in place of `name`
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # of requests: fields of `SamplingParams`

    def adapter_of(self, model: str) -> str:
        """The adapter that a request for `model` gets; empty = none. Raises `ModelNotFound`."""
        if model in self.adapters:
            return model
        if model not in ("", self.name):
            also = f", with the adapters {', '.join(self.adapters)}" if self.adapters else ""
            raise ModelNotFound(f"model {quoted(model)} is not served here; the served model is {self.name!r}{also}")
        return ""
