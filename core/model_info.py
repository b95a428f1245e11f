"""The properties of a model that matter outside the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    fingerprint: str  # of the weights; KVLayout.model
    vocab_size: int
    context_length: int  # in tokens, prompt and output together
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
