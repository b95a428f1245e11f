"""The limit of prompt tokens in a step: a token budget, and a time budget while sequences decode.

    max_batched_tokens = decodes of the step + prompt tokens + decodes still to be added
    step limit        >= predicted seconds of all decodes + predicted seconds of the prompt tokens

The step limit holds only while sequences wait for their next token. Each step takes at least MIN_PROMPT_TOKENS tokens
of prompts if the token budget has room, so a prompt goes on however long the decodes take.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.cost.step_cost import StepCost

MIN_PROMPT_TOKENS = 16
LIMIT_SHARE = 0.9  # of the wanted time between tokens: the rest is for steps that take longer than predicted


@dataclass(slots=True)
class StepBudget:
    num_tokens: int  # left
    num_reserved: int = 0  # ... for decodes that are not in the step yet
    cost: StepCost | None = None  # None = the step has no time limit
    seconds: float = 0.0  # left for prompts
    num_guaranteed: int = MIN_PROMPT_TOKENS  # prompt tokens that the step may take without seconds left

    @property
    def has_prompt_room(self) -> bool:
        in_time = self.cost is None or self.seconds > self.cost.token_s or self.num_guaranteed > 0
        return in_time and self.num_tokens > self.num_reserved

    def prompt_tokens(self, wanted: int, start: int) -> int:
        """How many of the prompt tokens [start, start + wanted) the step may take."""
        if not self.has_prompt_room:
            return 0
        return min(wanted, self.num_tokens - self.num_reserved, self._tokens_in_time(start))

    def take_prompt(self, num_tokens: int, start: int) -> None:
        if self.cost is not None:
            self.seconds -= self.cost.prompt_seconds(num_tokens, start)
            self.num_guaranteed -= num_tokens
        self.num_tokens -= num_tokens

    def take_decodes(self, count: int) -> None:
        self.num_tokens -= count
        self.num_reserved = max(self.num_reserved - count, 0)

    def _tokens_in_time(self, start: int) -> int:
        if self.cost is None:
            return self.num_tokens
        return max(self.cost.tokens_within(self.seconds, start), self.num_guaranteed, 1)
