"""The C kernel draws the same tokens as the numpy code."""

from __future__ import annotations

import numpy as np
import pytest

from core.request import MIN_REPETITION_PENALTY, SamplingParams, draw_key
from core.step import ScheduledChunk, SequenceView
from engine.cpu.kernels import Kernels
from engine.cpu.sampling import NativeDraw
from engine.sampling import Sampler, adjust, draw_token
from tests.support.c_kernels import need_kernels
from tests.unit.engine.cpu.kernel_cases import draw_differences


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return need_kernels()


def test_no_other_token_that_the_filters_keep_has_a_better_score(kernels: Kernels) -> None:
    found = [difference for seed in range(400) for difference in draw_differences(kernels, seed)]
    assert [difference for difference in found if not difference[1] <= 1e-5] == []


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_k": 50},
        {"top_k": 500, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.5, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_tokens_are_those_of_numpy_in_a_whole_vocabulary(
    kernels: Kernels, spread: float, filters: dict[str, float]
) -> None:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=1, **filters)  # type: ignore[arg-type]
    native, rows = NativeDraw(kernels), rng.normal(0.0, spread, (20, 49_152)).astype(np.float32)
    drawn = [
        (native(row, sampling, draw_key(seed, 1)), draw_token(row, sampling, draw_key(seed, 1)))
        for seed, row in enumerate(rows)
    ]
    assert all(ours == theirs for ours, theirs in drawn)
    assert len({ours for ours, _ in drawn}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-6, 1e-5])
@pytest.mark.parametrize("repetition_penalty", [MIN_REPETITION_PENALTY, 1.0])
def test_the_smallest_temperatures_and_penalties_draw_the_likeliest_token(
    kernels: Kernels, temperature: float, repetition_penalty: float
) -> None:
    logits = np.random.default_rng(3).normal(0.0, 20.0, (1, 1000)).astype(np.float32)
    sampling = SamplingParams(max_tokens=1, temperature=temperature, repetition_penalty=repetition_penalty)
    likeliest = int(adjust(logits[0], sampling, (np.array([7]), np.array([0]))).argmax())
    for draw in (NativeDraw(kernels), draw_token):
        chunk = ScheduledChunk(SequenceView("a", [7], 1, [0], sampling), 0, 1, True, False)
        assert Sampler([chunk]).sample(logits, draw=draw)["a"][0].token_id == likeliest
