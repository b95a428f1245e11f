"""What a router remembers of a choice that has ended: references to what it knows anyway, and no tokens."""

from __future__ import annotations

from dataclasses import dataclass

from core.lifecycle import Stage
from core.request import SamplingParams
from router.requests.events import Attempt, Outcome
from runtime.tracing.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """One choice of a call, or a refused call. Times are on the monotonic clock, but for `arrived_unix_s`."""

    trace: TraceContext
    request_id: str  # of the client, equal for all choices of a call
    choice: int
    operation: str  # "chat" or "text_completion"
    model: str
    arrived_at: float
    ended_at: float  # after the last message
    arrived_unix_s: float
    tenant: str = ""
    sampling: SamplingParams | None = None  # None: refused before it was read
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stages: tuple[tuple[Stage, float, float], ...] = ()  # in the router: stage, start, end; oldest first
    generated_at: float | None = None  # when the generation ended
    outcome: Outcome | None = None  # None after an error
    error_code: str = ""
    error: str = ""
    attempts: tuple[Attempt, ...] = ()

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def first_token_s(self) -> float:
        """From the arrival; 0 without a token."""
        started = next((start for stage, start, _ in self.stages if stage is Stage.DECODE), self.arrived_at)
        return started - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return 0.0
        decode_s = sum(end - start for stage, start, end in self.stages if stage is Stage.DECODE)
        return decode_s / (self.num_output_tokens - 1)

    @property
    def end(self) -> str:
        return self.error_code if self.outcome is None else self.outcome.finish_reason.value
