"""What everyone but the engine needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    fingerprint: str  # of the weights' identity; goes into KVLayout.model
    vocab_size: int
    context_length: int  # tokens, prompt and output together
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
