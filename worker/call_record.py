"""A worker's record of one call for its trace: the queue on arrival, and its steps in each stage.

The core counts steps of the whole worker. The difference between two marks gives the steps of a stage and their mean
batch size, so a token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.lifecycle import Stage, Timeline
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client.stubs import worker_pb2


@dataclass(slots=True)
class StepCounts:
    """Of all completed steps of the worker."""

    num_steps: int = 0
    num_sequences: int = 0  # summed over the steps

    def record(self, num_sequences: int) -> None:
        self.num_steps += 1
        self.num_sequences += num_sequences


@dataclass(slots=True)
class CallRecord:
    queue_depth: int = 0  # sequences that waited when the call arrived
    queue_tokens: int = 0  # that they had to compute
    _marks: dict[Stage, tuple[int, int]] = field(default_factory=dict)  # the counts at the start of the stage

    def mark(self, stage: Stage, counts: StepCounts) -> None:
        """The stage starts, and the one before ends."""
        # DECODE comes again after a move has failed.
        self._marks.setdefault(stage, (counts.num_steps, counts.num_sequences))

    def steps_in(self, stage: Stage) -> tuple[int, float]:
        """Steps during a stage that has ended, and their mean number of sequences."""
        starts = list(self._marks)
        if stage not in self._marks or starts[-1] is stage:
            return 0, 0.0
        steps, sequences = self._marks[stage]
        end_steps, end_sequences = self._marks[starts[starts.index(stage) + 1]]
        num_steps = end_steps - steps
        return num_steps, (end_sequences - sequences) / num_steps if num_steps else 0.0


def stage_spans(
    timeline: Timeline,
    record: CallRecord,
    names: Mapping[Stage, SpanName],
    attributes: Mapping[Stage, Mapping[str, object]],
    common: Mapping[str, object],
) -> list[worker_pb2.StageSpan]:
    """One span for each past stage of the timeline that has a name in `names`."""
    arrived_at = timeline.begun_at
    spans = []
    for stage, start, end in timeline.history:
        if stage not in names:
            continue
        values = {**common, **attributes.get(stage, {})}
        if stage is Stage.QUEUE:
            values[Attribute.QUEUE_DEPTH] = record.queue_depth
            values[Attribute.QUEUE_TOKENS] = record.queue_tokens
        elif stage not in (Stage.TRANSFER, Stage.MOVE):
            values[Attribute.STEPS], values[Attribute.BATCH_SIZE] = record.steps_in(stage)
        spans.append(
            worker_pb2.StageSpan(
                name=names[stage].value,
                start_ms=(start - arrived_at) * 1e3,
                duration_ms=(end - start) * 1e3,
                attributes={key: _text(value) for key, value in values.items()},
            )
        )
    return spans


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
