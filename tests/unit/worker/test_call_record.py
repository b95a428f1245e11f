"""What calls and steps have cost: stages with their steps, KV block-seconds, durations, operations and bytes."""

from __future__ import annotations

import pytest

from core.cost.model_work import ModelSizes, Peak
from core.cost.step_cost import StepWork
from core.lifecycle import Stage, Timeline
from core.scheduling.worker_load import STEP_BOUNDS_S
from model_files.builtin_configs import RANDOM_CONFIGS
from runtime.tracing.span_names import Attribute, SpanName
from worker.block_meter import BlockMeter
from worker.call_record import CallRecord, StepCounts, stage_spans
from worker.step_stats import StepStats

NAMES = {
    Stage.QUEUE: SpanName.DECODE_QUEUE,
    Stage.PREFILL: SpanName.DECODE_PREFILL,
    Stage.DECODE: SpanName.DECODE_COMPUTE,
}


def test_steps_and_batches_belong_to_the_stage_in_which_they_ended() -> None:
    timeline, record, counts = Timeline(Stage.QUEUE, 10.0), CallRecord(3, 120), StepCounts()
    counts.record(9)  # before the prompt began
    for stage, now, batches in ((Stage.PREFILL, 10.5, (2, 4)), (Stage.DECODE, 11.0, (8,)), (Stage.FINISHED, 12.0, ())):
        timeline.enter(stage, now)
        record.mark(stage, counts)
        for batch in batches:
            counts.record(batch)
    queue, prefill, decode = stage_spans(timeline, record, NAMES, {Stage.PREFILL: {"x": 1.5}}, {"worker": "w"})
    assert dict(queue.attributes) == {"worker": "w", Attribute.QUEUE_DEPTH: "3", Attribute.QUEUE_TOKENS: "120"}
    assert dict(prefill.attributes) == {"worker": "w", "x": "1.5", Attribute.STEPS: "2", Attribute.BATCH_SIZE: "3"}
    assert (decode.attributes[Attribute.STEPS], decode.attributes[Attribute.BATCH_SIZE]) == ("1", "8")
    assert (queue.start_ms, prefill.start_ms, decode.start_ms) == pytest.approx((0.0, 500.0, 1000.0))
    assert [span.duration_ms for span in (queue, prefill, decode)] == pytest.approx([500.0, 500.0, 1000.0])


def test_a_stage_without_a_step_has_no_batch() -> None:
    record = CallRecord()
    assert record.steps_in(Stage.PREFILL) == (0, 0.0)
    record.mark(Stage.PREFILL, StepCounts())
    assert record.steps_in(Stage.PREFILL) == (0, 0.0), "it has not ended"


@pytest.mark.parametrize(
    ("noted", "read_at", "area"),
    [
        ([(2, 10.0), (4, 13.0)], 17.0, 2 * 3 + 4 * 4),
        ([(3, 0.0), (0, 2.0), (1, 10.0)], 11.0, 3 * 2 + 1),  # preempted, and computed again
        ([], 5.0, 0.0),
    ],
)
def test_the_area_under_the_block_count(noted: list[tuple[int, float]], read_at: float, area: float) -> None:
    meter = BlockMeter()
    for num_blocks, now in noted:
        meter.note("a", num_blocks, now)
    assert meter.read("a", read_at) == meter.read("a", read_at) == area
    meter.forget("a")
    assert (meter.read("a", read_at), len(meter)) == (0.0, 0)


SIZES = ModelSizes(num_layer_weights=100, num_head_weights=10, weight_bytes=2.0, pair_flop=4.0, kv_bytes=8.0)
DECODES = StepWork(num_decodes=2, decode_context=30, prefill_tokens=0, attended_pairs=0.0)
PROMPT = StepWork(num_decodes=0, decode_context=0, prefill_tokens=10, attended_pairs=50.0)


def test_a_decode_computes_and_reads_every_weight_and_a_prompt_those_of_the_layers_for_each_token() -> None:
    assert SIZES.flop(DECODES) == 2 * (100 + 10) * 2 + 4 * 30
    assert SIZES.flop(PROMPT) == 2 * 100 * 10 + 4 * 50
    assert SIZES.memory_bytes(DECODES) == 110 * 2 + 8 * (30 + 2), "the weights once, and the KV of each context"
    assert SIZES.memory_bytes(PROMPT) == 110 * 2 + 8 * (5 + 10)


def test_steps_with_a_decode_are_counted_by_duration() -> None:
    stats = StepStats()
    for seconds, counted in ((STEP_BOUNDS_S[0], (1,)), (STEP_BOUNDS_S[2], (1, 0, 1)), (100.0, (1, 0, 1, *[0] * 11, 1))):
        stats.record(DECODES, seconds)
        assert stats.decode_steps == counted
    stats.record(PROMPT, 1.0)
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
    done = (SIZES.flop(DECODES), SIZES.memory_bytes(DECODES)) if stats.sizes else (0.0, 0.0)
    assert (stats.flop, stats.memory_bytes) == done
    assert (stats.flop_use, stats.bandwidth_use) == (0.0, 0.0)
