"""The time of a step, as a linear model of what the step computes.

    step = step_s + decodes x sequence_s + decode context x context_s
           + prefill tokens x token_s + attended pairs x pair_s

A *decode* is a chunk of one token. The decode context is the number of tokens that all decodes attend to.
A *pair* is one prefill token and one token at or before it in the same sequence.

Schedulers size their steps with it, routers price requests with it, and the simulator has it in place of a model. A
worker fits its own (`core/cost/step_cost_fit.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from core.step import ScheduledChunk


class StepWork(NamedTuple):
    """The work of a step: the terms of the cost model, without the constant one."""

    num_decodes: int
    decode_context: int  # tokens
    prefill_tokens: int
    attended_pairs: float


def work_of(chunks: Iterable[ScheduledChunk]) -> StepWork:
    """The work of a step without its drafts, which have a price of their own (core/scheduling/drafts.py)."""
    num_decodes = context = num_tokens = 0
    pairs = 0.0
    for _, start, length, _, _, _ in chunks:
        if length == 1:
            num_decodes += 1
            context += start + 1
        else:
            num_tokens += length
            pairs += length * (start + length / 2)
    return StepWork(num_decodes, context, num_tokens, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds, none negative."""

    step_s: float  # of any step: the weights are read once
    sequence_s: float  # of a decode
    context_s: float  # of a token that a decode attends to
    token_s: float  # of a prefill token
    pair_s: float  # of a prefill token and a token that it attends to

    def seconds(self, work: StepWork) -> float:
        num_decodes, context, num_tokens, pairs = work
        decodes = num_decodes * self.sequence_s + context * self.context_s
        return self.step_s + decodes + num_tokens * self.token_s + pairs * self.pair_s

    def prompt_seconds(self, num_tokens: int, start: int = 0) -> float:
        """Of the tokens [start, start + num_tokens) of a prompt, without `step_s`, which prompts of a step share."""
        return num_tokens * self.token_s + num_tokens * (start + num_tokens / 2) * self.pair_s

    def tokens_within(self, seconds: float, start: int = 0) -> int:
        """The most tokens of a prompt, from `start` on, that take at most `seconds`: `prompt_seconds` inverted."""
        if seconds <= 0.0:
            return 0
        linear = self.token_s + start * self.pair_s
        # pair_s / 2 x n^2 + linear x n = seconds, solved in the form that stays exact for a small pair_s
        root = (linear * linear + 2.0 * self.pair_s * seconds) ** 0.5
        return int(2.0 * seconds / (linear + root)) if linear + root > 0.0 else 2**31


# Until a worker has measured steps of its own: about a small model on one core of a CPU.
PRIOR = StepCost(step_s=2e-2, sequence_s=5e-4, context_s=5e-7, token_s=1e-3, pair_s=2e-7)
