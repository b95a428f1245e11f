"""The submitted steps of a runner: their order, their promised tokens, and their end after an exception.

Every runner has one queue and gives it two functions: `prepare` makes the inputs of a step on the submitting thread,
and `compute` samples the tokens of the step on the collecting thread. `engine/runner.py` states the law.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.scheduler import MAX_STEPS_IN_FLIGHT
from core.step import SampledToken, ScheduledChunk, StepOutput, StepPlan
from engine.runner import StepDropped

Inputs = TypeVar("Inputs")
PromisedTokens = Mapping[str, int]  # of a step's promised chunks, by sequence id, in the order of the chunks
NO_TOKENS: PromisedTokens = {}


@dataclass(slots=True)
class _Submitted(Generic[Inputs]):
    step_id: int
    promised: list[str]  # ids of the sequences with promised chunks
    inputs: Inputs
    dropped: bool = False


class StepQueue(Generic[Inputs]):
    """One thread calls `submit`, and one thread calls `collect`."""

    def __init__(
        self,
        prepare: Callable[[StepPlan], Inputs],
        compute: Callable[[Inputs, PromisedTokens], Mapping[str, SampledToken]],
    ) -> None:
        self._prepare = prepare
        self._compute = compute
        self._steps: deque[_Submitted[Inputs]] = deque()
        self._sampled_before: Mapping[str, SampledToken] = {}  # by the step collected last

    def submit(self, step: StepPlan) -> None:
        assert len(self._steps) < MAX_STEPS_IN_FLIGHT, f"{MAX_STEPS_IN_FLIGHT} steps are submitted already"
        promised = [chunk.sequence.sequence_id for chunk in step.chunks if chunk.promised]
        self._steps.append(_Submitted(step.step_id, promised, self._prepare(step)))

    def collect(self) -> StepOutput:
        assert self._steps, "no step is submitted"
        step = self._steps[0]
        sampled_before, self._sampled_before = self._sampled_before, {}
        try:
            promised = _promised_tokens(step, sampled_before)
            self._sampled_before = self._compute(step.inputs, promised)
        except StepDropped:
            raise
        except BaseException:
            for later in tuple(self._steps):
                later.dropped = True
            raise
        finally:
            self._steps.popleft()
        return StepOutput(step.step_id, self._sampled_before)


def _promised_tokens(step: _Submitted[Inputs], sampled_before: Mapping[str, SampledToken]) -> PromisedTokens:
    if step.dropped:
        raise StepDropped(f"step {step.step_id} is not computed: the step before has failed")
    try:
        return {name: sampled_before[name].token_id for name in step.promised}
    except KeyError as missing:
        raise StepDropped(
            f"step {step.step_id} is not computed: the step before has no token for {missing}"
        ) from missing


def tokens_of(chunk: ScheduledChunk, promised: PromisedTokens) -> Sequence[int]:
    """The tokens that the chunk computes."""
    view, start, num_tokens, _, is_promised = chunk
    return [promised[view.sequence_id]] if is_promised else view.token_ids[start : start + num_tokens]
