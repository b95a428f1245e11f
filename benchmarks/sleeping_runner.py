"""A runner that computes nothing: each step takes a fixed time, and a time for each prompt token, as on a GPU that
needs no help from Python.

A sampled token tells when it was sampled: its id counts units of 20 us on the clock that all processes of a machine
share. So a client computes the age of a token from its id.
"""

from __future__ import annotations

import time
from collections import deque

from core.kv_layout import KVLayout
from core.model_info import ModelInfo
from core.step import SampledToken, StepOutput, StepPlan
from engine.fake_runner import FakeRunner

UNITS_PER_S = 50_000
FIRST_ID, NUM_IDS = 1_000, 40_000  # ordinary tokens of the default model; the ids repeat after 0.8 s


class SleepingRunner(FakeRunner):
    """`FakeRunner` without its model: only the pool is real."""

    def __init__(self, info: ModelInfo, num_blocks: int, layout: KVLayout, step_s: float, token_s: float = 0.0) -> None:
        super().__init__(info, layout, num_blocks)
        self._step_s, self._token_s = step_s, token_s
        self._submitted: deque[StepPlan] = deque()
        self._ended_at = 0.0

    def submit(self, step: StepPlan) -> None:
        self._submitted.append(step)

    def collect(self) -> StepOutput:
        step = self._submitted.popleft()
        num_prompt_tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)
        time.sleep(self._step_s + num_prompt_tokens * self._token_s)
        token = SampledToken(token_id_at(time.monotonic()))
        return StepOutput(
            step.step_id, {chunk.sequence.sequence_id: (token,) for chunk in step.chunks if chunk.samples}
        )


def token_id_at(now: float) -> int:
    return FIRST_ID + int(now * UNITS_PER_S) % NUM_IDS


def age_s(token_id: int, now: float) -> float:
    """Seconds since the token was sampled, if that was less than 0.8 s ago."""
    return ((token_id_at(now) - token_id) % NUM_IDS) / UNITS_PER_S
