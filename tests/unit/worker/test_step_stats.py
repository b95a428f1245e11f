"""The steps of a worker in its report: durations by bucket, operations and bytes, and shares of the peak."""

from __future__ import annotations

import pytest

from core.cost.model_work import ModelSizes, Peak
from core.cost.step_cost import StepWork
from core.scheduling.worker_load import STEP_BOUNDS_S
from model_files.builtin_configs import RANDOM_CONFIGS
from worker.step_stats import StepStats

SIZES = ModelSizes(num_layer_weights=100, num_head_weights=10, weight_bytes=2.0, pair_flop=4.0, kv_bytes=8.0)
DECODES = StepWork(num_decodes=2, decode_context=30, prefill_tokens=0, attended_pairs=0.0)
PROMPT = StepWork(num_decodes=0, decode_context=0, prefill_tokens=10, attended_pairs=50.0)


def test_a_decode_computes_every_weight_for_each_sequence_and_attends_to_its_context() -> None:
    assert SIZES.flop(DECODES) == 2 * (100 + 10) * 2 + 4 * 30


def test_a_prompt_computes_the_weights_of_the_layers_for_each_token() -> None:
    assert SIZES.flop(PROMPT) == 2 * 100 * 10 + 4 * 50


def test_the_weights_are_read_once_and_the_kv_of_each_context() -> None:
    assert SIZES.memory_bytes(DECODES) == 110 * 2 + 8 * (30 + 2)
    assert SIZES.memory_bytes(PROMPT) == 110 * 2 + 8 * (5 + 10)


def test_steps_with_a_decode_are_counted_by_duration() -> None:
    stats = StepStats()
    for seconds in (STEP_BOUNDS_S[0], STEP_BOUNDS_S[2], 100.0):
        stats.record(DECODES, seconds)
    stats.record(PROMPT, 1.0)
    assert stats.decode_steps == (1, 0, 1, *[0] * 11, 1)
    assert stats.seconds == pytest.approx(101.0 + STEP_BOUNDS_S[0] + STEP_BOUNDS_S[2])
    assert stats.decode_seconds == pytest.approx(stats.seconds - 1.0)


def test_the_shares_of_the_peak_follow_the_newest_steps() -> None:
    stats = StepStats(SIZES, Peak(flop_per_s=SIZES.flop(DECODES) / 0.1, bytes_per_s=SIZES.memory_bytes(DECODES) / 0.05))
    for _ in range(100):
        stats.record(DECODES, 0.1)
    assert (stats.flop_use, stats.bandwidth_use) == (pytest.approx(1.0), pytest.approx(0.5))
    for _ in range(100):
        stats.record(DECODES, 0.2)
    assert stats.flop_use == pytest.approx(0.5, abs=1e-3)


def test_the_sizes_of_a_model_are_its_number_of_weights() -> None:
    sizes = RANDOM_CONFIGS["smollm2-135m"].sizes(weight_bytes=2.0, kv_bytes=23_040.0)
    assert sizes.num_layer_weights + sizes.num_head_weights == pytest.approx(134.5e6, rel=0.01)
    assert sizes.pair_flop == 4 * 30 * 576


@pytest.mark.parametrize("stats", [StepStats(), StepStats(SIZES)], ids=["no sizes", "no peak"])
def test_without_sizes_or_a_peak_there_is_no_share(stats: StepStats) -> None:
    assert stats.decode_steps == ()
    stats.record(DECODES, 0.1)
    assert (stats.flop > 0) == (stats.sizes is not None)
    assert (stats.flop_use, stats.bandwidth_use) == (0.0, 0.0)
