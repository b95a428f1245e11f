"""The cost model reproduces the public measurements that its constants come from."""

from __future__ import annotations

import pytest

from core.cost.step_cost import work_of
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from simulator.cost_model import H100_8B

# (concurrency, prompt, output) -> measured gap between tokens in ms: Llama-3.1-8B-Instruct, one H100, TensorRT-LLM.
# Six of the 45 points of the fit, from silicon_sample.csv of ai-dynamo/aiconfigurator (Apache-2.0).


def chunk(start: int, num_tokens: int) -> ScheduledChunk:
    view = SequenceView("s", (), 1, (), SamplingParams(max_tokens=1))
    return ScheduledChunk(view, start, num_tokens, samples=True, promised=False)


def test_a_prompt_in_chunks_costs_one_step_more_for_each_chunk() -> None:
    whole = H100_8B.seconds(work_of(StepPlan(0, (chunk(0, 8192),))))
    halves = sum(H100_8B.seconds(work_of(StepPlan(0, (chunk(start, 4096),)))) for start in (0, 4096))
    assert halves - whole == pytest.approx(H100_8B.step_s)
    assert whole == pytest.approx(H100_8B.step_s + H100_8B.prompt_seconds(8192))
