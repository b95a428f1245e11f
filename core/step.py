"""One step of the engine, as data: what the scheduler asks of a Runner and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.lifecycle import FinishReason
from core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step.

    `token_ids` and `block_table` are the sequence's own lists, not copies: read-only, and stable until the step ends.
    Where `samples` is true the chunk reaches the sequence's last token, and the runner draws the token at position
    start + num_tokens.
    """

    sequence_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    start: int
    num_tokens: int
    block_table: Sequence[int]
    samples: bool
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    chunks: tuple[ScheduledChunk, ...]  # each sequence at most once

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None  # natural log, of the model's distribution before penalties and filters
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled` holds one token for each chunk of the plan that samples."""

    step_id: int
    sampled: Mapping[str, SampledToken]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence got its token at `index` (0 = the first after the prompt)."""

    sequence_id: str
    index: int
    token: SampledToken
    finish_reason: FinishReason | None
