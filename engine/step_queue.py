"""The submitted steps of a runner: their order, their promised tokens, and their end after an exception.

Every runner is a `QueuedRunner` with two functions: `_prepare` makes the inputs of a step on the submitting thread, and
`_compute` samples the tokens of the step on the collecting thread. `engine/runner.py` states the law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from core.errors import TandemError
from core.scheduling.scheduler import MAX_STEPS_IN_FLIGHT
from core.step import NO_FAILURES, NO_PROPOSALS, Proposal, SampledToken, ScheduledChunk, StepOutput, StepPlan
from engine.runner import StepDropped

Inputs = TypeVar("Inputs")
PromisedTokens = Mapping[str, int]  # of a step's promised chunks, by sequence id, in the order of the chunks
NO_TOKENS: PromisedTokens = {}


class Computed(NamedTuple):
    """Like `StepOutput`, which adds the id of the step."""

    sampled: Mapping[str, tuple[SampledToken, ...]]
    failed: Mapping[str, TandemError] = NO_FAILURES
    proposed: Mapping[str, Proposal] = NO_PROPOSALS


NOTHING_COMPUTED = Computed({})


@dataclass(slots=True)
class _Submitted(Generic[Inputs]):
    plan: StepPlan
    inputs: Inputs
    dropped: bool = False


class QueuedRunner(ABC, Generic[Inputs]):
    """One thread calls `submit`, and one thread calls `collect`."""

    def __init__(self) -> None:
        self._steps: deque[_Submitted[Inputs]] = deque()
        self._before = NOTHING_COMPUTED  # the step collected last

    @abstractmethod
    def _prepare(self, step: StepPlan) -> Inputs: ...

    @abstractmethod
    def _compute(self, inputs: Inputs, promised: PromisedTokens) -> Computed: ...

    def submit(self, step: StepPlan) -> None:
        assert len(self._steps) < MAX_STEPS_IN_FLIGHT, f"{MAX_STEPS_IN_FLIGHT} steps are submitted already"
        self._steps.append(_Submitted(step, self._prepare(step)))

    def collect(self) -> StepOutput:
        assert self._steps, "no step is submitted"
        step = self._steps[0]
        before, self._before = self._before, NOTHING_COMPUTED
        try:
            if step.dropped:
                raise StepDropped(f"step {step.plan.step_id} is not computed: the step before has failed")
            computed = self._compute(step.inputs, _promised_tokens(step.plan, before))
            self._before = _without_failed(step.plan, before.failed, computed) if before.failed else computed
        except StepDropped:
            raise
        except BaseException:
            for later in tuple(self._steps):
                later.dropped = True
            raise
        finally:
            self._steps.popleft()
        sampled, failed, proposed = self._before
        return StepOutput(step.plan.step_id, sampled, failed, proposed=proposed)


def _promised_tokens(plan: StepPlan, before: Computed) -> PromisedTokens:
    """Token 0 replaces the token of a sequence that failed in the step before."""
    promised: dict[str, int] = {}
    for name in (chunk.sequence.sequence_id for chunk in plan.chunks if chunk.promised):
        if name in before.sampled:
            promised[name] = before.sampled[name][-1].token_id
        elif name in before.failed:
            promised[name] = 0
        else:
            raise StepDropped(f"step {plan.step_id} is not computed: the step before has no token for {name!r}")
    return promised


def _without_failed(plan: StepPlan, failed_before: Mapping[str, TandemError], computed: Computed) -> Computed:
    """A sequence that failed in the step before fails in this step too, because this step was planned ahead."""
    names = [chunk.sequence.sequence_id for chunk in plan.chunks]
    failed = {name: failed_before[name] for name in names if name in failed_before}
    sampled = {name: tokens for name, tokens in computed.sampled.items() if name not in failed}
    return Computed(sampled, {**computed.failed, **failed}, computed.proposed)


def tokens_of(chunk: ScheduledChunk, promised: PromisedTokens) -> Sequence[int]:
    """The tokens that the chunk computes, with its drafts."""
    view, start, num_tokens, _, is_promised, drafts = chunk
    return [promised[view.sequence_id]] if is_promised else [*view.token_ids[start : start + num_tokens], *drafts]
