"""One step of the engine, as data: the scheduler's plan and the Runner's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from core.errors import TandemError
from core.lifecycle import FinishReason
from core.request import SamplingParams


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SequenceView:
    """The part of a sequence that a runner sees: one object for the life of the sequence on this worker.

    `token_ids` and `block_table` are the lists of the sequence, not copies. Both grow at their end, also during a step.
    The runner must not change them. The block table never shrinks while a step of the sequence is in flight.
    """

    sequence_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_table: Sequence[int]
    sampling: SamplingParams


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step.

    If `samples` is true, the runner samples the token at position start + num_tokens. A promised chunk has one token:
    the token that the step before samples. That step is in flight or has just ended, so the runner takes the token from
    the output of that step. `token_ids[:start]` is complete.

    `drafts` are guesses of the tokens behind the chunk. The runner computes them too, and samples one more token behind
    each draft that equals the token sampled in its place. So the sampled tokens are those of a run without drafts.
    """

    sequence: SequenceView
    start: int
    num_tokens: int
    samples: bool
    promised: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens and drafts: the slots that the step writes."""
        return self.num_tokens + len(self.drafts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    chunks: tuple[ScheduledChunk, ...]  # each sequence at most once
    wants_proposals: bool = True  # else guesses would not pay in the next step

    @property
    def num_drafts(self) -> int:
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """With drafts."""
        return sum(chunk.num_rows for chunk in self.chunks)


NO_FAILURES: Mapping[str, TandemError] = MappingProxyType({})


FORCED = 0  # the match of a token that a grammar forces; a model may still spell the same text in other tokens


class Proposal(NamedTuple):
    """Guesses of the next tokens of a sequence.

    The match of a guess is the number of tokens before it that equal those before the place where it comes from.
    """

    token_ids: tuple[int, ...] = ()
    matches: tuple[int, ...] = ()

    @classmethod
    def copied(cls, token_ids: tuple[int, ...], match: int) -> Proposal:
        """Guesses that come from one place, the first of them behind `match` equal tokens."""
        return cls(token_ids, tuple(range(match, match + len(token_ids))))

    @classmethod
    def forced(cls, token_ids: tuple[int, ...]) -> Proposal:
        return cls(token_ids, (FORCED,) * len(token_ids))

    def with_next(self, following: Proposal, count: int) -> Proposal:
        """This proposal, continued by the first `count` guesses of `following`."""
        return Proposal(self.token_ids + following.token_ids[:count], self.matches + following.matches[:count])


NO_PROPOSAL = Proposal()
NO_PROPOSALS: Mapping[str, Proposal] = MappingProxyType({})


class SampledToken(NamedTuple):
    token_id: int
    logprob: float | None = None  # natural logarithm, in the model's distribution before penalties and filters
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled` has the tokens of each chunk with `samples`, by sequence id: one, and one more for each right draft.

    `failed` has the sequences of the step that could not be computed. The other chunks of the step are complete.
    `proposed` has guesses of the tokens behind the sampled ones, by sequence id.
    """

    step_id: int
    sampled: Mapping[str, tuple[SampledToken, ...]]
    failed: Mapping[str, TandemError] = field(default_factory=lambda: NO_FAILURES)
    seconds: float | None = None  # that the engine took; None if nobody measured it
    proposed: Mapping[str, Proposal] = field(default_factory=lambda: NO_PROPOSALS)


class TokenEvent(NamedTuple):
    """A new token of a sequence. `index` 0 is the first token after the prompt."""

    sequence_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    token: SampledToken
    finish_reason: FinishReason | None
