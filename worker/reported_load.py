"""Parts of the load report that need some arithmetic: the step cost, and the backlog of prompts."""

from __future__ import annotations

from collections.abc import Iterable

from core.cost.step_cost import StepCost, StepWork
from core.scheduling.sequence import Sequence
from core.scheduling.worker_load import NUM_SIZE_CLASSES, size_class

REPORTED_CHANGE = 0.02  # of the predicted duration of a typical step; smaller changes are noise

# Few and many decodes, short and long contexts, prompts at their begin and far in.
_TYPICAL_STEPS = tuple(
    StepWork(num_decodes, num_decodes * context, num_tokens, num_tokens * (start + num_tokens / 2))
    for num_decodes, context, num_tokens, start in (
        (1, 500, 0, 0), (32, 500, 0, 0), (32, 4000, 0, 0), (0, 0, 32, 0), (0, 0, 512, 0), (0, 0, 512, 8000),
    )
)  # fmt: skip


class ReportedCost:
    """The fitted cost as of the last change that matters, so that the report of an idle worker does not change."""

    def __init__(self, cost: StepCost) -> None:
        self._fitted = self._reported = cost

    def update(self, fitted: StepCost) -> StepCost:
        if fitted is not self._fitted:
            self._fitted = fitted
            if any(self._has_changed(work) for work in _TYPICAL_STEPS):
                self._reported = fitted
        return self._reported

    def _has_changed(self, work: StepWork) -> bool:
        reported = self._reported.seconds(work)
        return abs(self._fitted.seconds(work) - reported) > REPORTED_CHANGE * reported


def backlog_of(prompts: Iterable[tuple[int, int]], cost: StepCost) -> tuple[float, ...]:
    """Seconds of work left by the size class of what is left of each prompt (see `Scheduler.prompts_left`).

    No zeros at the end.
    """
    seconds = [0.0] * NUM_SIZE_CLASSES
    num_classes = 0
    for num_tokens, start in prompts:
        work = cost.prompt_seconds(num_tokens, start)
        index = size_class(work)
        seconds[index] += work
        num_classes = max(num_classes, index + 1)
    return tuple(seconds[:num_classes])


def decode_contexts(running: Iterable[Sequence]) -> list[int]:
    """The numbers of tokens that the sequences in decode attend to."""
    return [
        sequence.num_computed_tokens
        for sequence in running
        if sequence.num_computed_tokens >= sequence.view.num_prompt_tokens and sequence.num_uncomputed_tokens == 1
    ]
