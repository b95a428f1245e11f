"""Helpers of the fault tests of one pair of workers: counters of its hand-offs, and rules that lose messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.handoff import HandoffMessage, OwnerState, PullerState
from tests.support.deployment import Deployment, transfers
from tests.support.faults import Stream, prompt_of
from tests.support.steps import slow_down

FIRST, SECOND = prompt_of(1), prompt_of(2)


def offers_ended(deployment: Deployment, state: OwnerState) -> int:
    return transfers(deployment.prefill[0]).counters.offers[state.value]


def pulls_ended(deployment: Deployment, state: PullerState) -> int:
    return transfers(deployment.decode[0]).counters.pulls[state.value]


def agent_name(deployment: Deployment) -> str:
    return transfers(deployment.prefill[0]).address.name


def lose(kind: type[HandoffMessage], count: int = 1_000_000) -> Callable[[HandoffMessage], Sequence[int] | None]:
    """A rule for `Wire` that loses the first `count` messages of this kind."""
    left = [count]

    def rule(message: HandoffMessage) -> Sequence[int] | None:
        if not isinstance(message, kind) or not left[0]:
            return None
        left[0] -= 1
        return ()

    return rule


async def bystander(deployment: Deployment, num_output: int = 60) -> Stream:
    """A request in decode while a fault happens. The fault must not change its stream."""
    slow_down(deployment.decode[0], 0.01)
    return await Stream(deployment.inference, prompt_of(77), num_output).reach(3)
