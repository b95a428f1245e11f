"""A request that is cancelled, or whose deadline passes, while it is computed, read or decoded: over real gRPC, with a
real agent. tests/simulation/test_every_move_state.py ends requests in every state of a hand-off.

Another request, in the middle of its tokens, is to notice nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio

from cli import compose
from core.handoff import OwnerState, PullerState
from kv_transfer.transports.memory_transport import MemoryFabric
from tests.support.deployment import SLACK_S, Deployment, deploy, transfers
from tests.support.faults import LEASE_S, Stream, fault_config, prompt_of, serves_on
from tests.support.steps import Gate, slow_down
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_SEEDS = itertools.count(1000)  # of prompts that no cache holds
TIMEOUT_S = 2.5  # time enough to reach any state; each is held for longer


@dataclass
class Scene:
    """One pair of workers."""

    deployment: Deployment
    fabric: MemoryFabric
    gate: Gate  # of the prefill worker

    def start(self, timeout_s: float) -> Stream:
        prompt = prompt_of(next(NEW_SEEDS), num_tokens=150)  # three chunks of 64
        return Stream(self.deployment.inference, prompt, num_output=1000, timeout_s=timeout_s)

    async def is_in(self, owner: OwnerState, puller: PullerState) -> None:
        def states() -> list[object]:
            workers = self.deployment.workers
            return [claim.state for worker in workers for claim in transfers(worker).claims()]  # type: ignore[attr-defined]

        await until(lambda: states() == [owner, puller], f"the hand-off is {owner.value} and {puller.value}")


async def computing(scene: Scene, timeout_s: float) -> Stream:
    """Its first chunk has been read already."""
    counters = transfers(scene.deployment.decode[0]).counters
    num_reads = counters.num_reads
    scene.gate.close(after=1)
    stream = scene.start(timeout_s)
    await until(lambda: counters.num_reads > num_reads, "its first chunk is read")
    await scene.is_in(OwnerState.OFFERED, PullerState.WANTING)
    return stream


async def reading(scene: Scene, timeout_s: float) -> Stream:
    num_stalled = scene.fabric.faults_done["stall"]
    scene.fabric.stall_reads = True
    stream = scene.start(timeout_s)
    await until(lambda: scene.fabric.faults_done["stall"] > num_stalled, "a read does not end")
    await scene.is_in(OwnerState.OFFERED, PullerState.READING)
    return stream


async def decoding(scene: Scene, timeout_s: float) -> Stream:
    return await scene.start(timeout_s).reach(4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        fabric = MemoryFabric()
        patch.setattr(compose, "FABRIC", fabric)
        async with deploy(fault_config(lease_s=3 * LEASE_S)) as deployment:  # the states last longer than TIMEOUT_S
            slow_down(deployment.decode[0], 0.01)
            yield Scene(deployment, fabric, Gate(deployment.prefill[0]))


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("hold", [computing, reading, decoding])
async def test_a_request_that_is_cancelled_or_late_ends_on_every_worker(
    scene: Scene, hold: Callable[[Scene, float], Awaitable[Stream]], is_cancelled: bool
) -> None:
    bystander = await Stream(scene.deployment.inference, prompt_of(next(NEW_SEEDS)), 100).reach(3)
    await until(lambda: not transfers(scene.deployment.prefill[0]).num_alive, "its hand-off is over")
    started = time.monotonic()
    stream = await hold(scene, 20.0 if is_cancelled else TIMEOUT_S)
    assert not stream.ended
    if is_cancelled:
        stream.cancel()
        await stream.typed(grpc.StatusCode.CANCELLED)
    else:
        await stream.typed(grpc.StatusCode.DEADLINE_EXCEEDED)
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    scene.gate.open()
    scene.fabric.stall_reads = False
    await bystander.right()
    await scene.deployment.settle()
    await serves_on(scene.deployment.inference)
