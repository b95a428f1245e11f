"""The cost model reproduces the public measurements that its constants come from."""

from __future__ import annotations

import pytest

from core.cost.step_cost import work_of
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from simulator.cost_model import H100_8B, layout_8b

# (concurrency, prompt, output) -> measured gap between tokens in ms: Llama-3.1-8B-Instruct, one H100, TensorRT-LLM.
# Six of the 45 points of the fit, from silicon_sample.csv of ai-dynamo/aiconfigurator (Apache-2.0).
MEASURED_MS = {
    (8, 1024, 512): 7.41678, (8, 4096, 128): 12.4043, (16, 2048, 256): 10.8757,
    (64, 1024, 128): 20.0515, (64, 4096, 512): 30.0890, (128, 2048, 128): 61.3218,
}  # fmt: skip


def chunk(start: int, num_tokens: int) -> ScheduledChunk:
    view = SequenceView("s", (), 1, (), SamplingParams(max_tokens=1))
    return ScheduledChunk(view, start, num_tokens, samples=True, promised=False)


def test_the_fit_is_within_8_percent_of_measured_gaps() -> None:
    for (batch, prompt, output), measured_ms in MEASURED_MS.items():
        decodes = StepPlan(0, tuple(chunk(prompt + output // 2, 1) for _ in range(batch)))
        prefill_s = batch * H100_8B.prompt_seconds(prompt) / output  # each sequence prefills once per output
        assert (H100_8B.seconds(work_of(decodes)) + prefill_s) * 1e3 == pytest.approx(measured_ms, rel=0.08)


def test_a_prompt_in_chunks_costs_one_step_more_for_each_chunk() -> None:
    whole = H100_8B.seconds(work_of(StepPlan(0, (chunk(0, 8192),))))
    halves = sum(H100_8B.seconds(work_of(StepPlan(0, (chunk(start, 4096),)))) for start in (0, 4096))
    assert halves - whole == pytest.approx(H100_8B.step_s)
    assert whole == pytest.approx(H100_8B.step_s + H100_8B.prompt_seconds(8192))


def test_a_token_of_kv_has_128_kib() -> None:
    assert layout_8b(64).token_bytes == 128 * 1024
