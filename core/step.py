"""One step of the engine, as data: the scheduler's plan and the Runner's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.lifecycle import FinishReason
from core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step.

    `token_ids` and `block_table` are the lists of the sequence, not copies. The runner must not change them, and they
    do not change before the step ends. If `samples` is true, the chunk contains the last token of the sequence, and the
    runner samples the token at position start + num_tokens.
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
    logprob: float | None = None  # natural logarithm, in the model's distribution before penalties and filters
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled` has one token for each chunk with `samples`, by sequence id."""

    step_id: int
    sampled: Mapping[str, SampledToken]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of a sequence. `index` 0 is the first token after the prompt."""

    sequence_id: str
    index: int
    token: SampledToken
    finish_reason: FinishReason | None
