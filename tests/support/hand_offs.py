"""Helpers of the fault tests of one pair of workers: counters of its hand-offs."""

from __future__ import annotations

from core.handoff import OwnerState, PullerState
from tests.support.deployment import Deployment, transfers
from tests.support.faults import Stream, prompt_of
from tests.support.steps import slow_down

FIRST = prompt_of(1)


def offers_ended(deployment: Deployment, state: OwnerState) -> int:
    return transfers(deployment.prefill[0]).counters.offers[state.value]


def pulls_ended(deployment: Deployment, state: PullerState) -> int:
    return transfers(deployment.decode[0]).counters.pulls[state.value]


def agent_name(deployment: Deployment) -> str:
    return transfers(deployment.prefill[0]).address.name


async def bystander(deployment: Deployment, num_output: int = 60) -> Stream:
    """A request in decode while a fault happens. The fault must not change its stream."""
    slow_down(deployment.decode[0], 0.01)
    return await Stream(deployment.inference, prompt_of(77), num_output).reach(3)
