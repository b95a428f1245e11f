"""The stages of a call have the steps of their time, and their mean batch."""

from __future__ import annotations

import pytest

from core.lifecycle import Stage, Timeline
from runtime.tracing.span_names import Attribute, SpanName
from worker.call_record import CallRecord, StepCounts, stage_spans

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
