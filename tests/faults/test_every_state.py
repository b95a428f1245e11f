"""A request that is cancelled, or whose deadline passes, at each state of its life. Each row holds the request in its
state, sees it there, and ends it; another request, in the middle of its tokens, is to notice nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import grpc
import pytest
import pytest_asyncio

from cli import compose
from core.handoff import Heartbeat, OwnerState, PullerState, Ready
from kv_transfer.transports.memory_transport import MemoryFabric
from protos.handoff_codec import encode
from tests.support.deployment import SLACK_S, Deployment, deploy, transfers
from tests.support.faults import LEASE_S, Stream, Wire, fault_config, prompt_of, serves_on
from tests.support.steps import Gate, slow_down
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_SEEDS = itertools.count(1000)  # of prompts that no cache holds
TIMEOUT_S = 2.5  # time enough to reach any state; each is held for longer


@dataclass
class Scene:
    """One pair of workers, a request that is being decoded, and what holds the other one back."""

    deployment: Deployment
    fabric: MemoryFabric
    wire: Wire
    gate: Gate  # of the prefill worker
    bystander: Stream = field(init=False)
    let_go: list[Callable[[], object]] = field(default_factory=list)  # undo what holds the request

    def start(self, timeout_s: float) -> Stream:
        prompt = prompt_of(next(NEW_SEEDS), num_tokens=150)  # three chunks of 64
        return Stream(self.deployment.inference, prompt, num_output=1000, timeout_s=timeout_s)

    def offer_states(self) -> list[OwnerState]:
        return [s.state for s in transfers(self.deployment.prefill[0]).claims()]  # type: ignore[misc]

    def pull_states(self) -> list[PullerState]:
        return [s.state for s in transfers(self.deployment.decode[0]).claims()]  # type: ignore[misc]

    async def pulls(self, state: PullerState) -> None:
        await until(lambda: self.pull_states() == [state], f"the pull is {state.value}")

    async def offers(self, state: OwnerState) -> None:
        await until(lambda: self.offer_states() == [state], f"the offer is {state.value}")


Hold = Callable[[Scene, float], Awaitable[Stream]]  # start the request and return when it is in its state


async def in_the_routers_queue(scene: Scene, timeout_s: float) -> Stream:
    shell = scene.deployment.router._shell
    workers = shell.view._workers

    def allow(max_in_flight: int) -> None:
        for record in workers:
            record.max_in_flight = max_in_flight
            record.refresh()
        workers.room_changed = True

    allow(1)
    scene.let_go.append(lambda: allow(64))
    stream = scene.start(timeout_s)
    await until(lambda: shell.view.num_queued == 1, "it is queued")
    return stream


async def in_the_prefill_workers_queue(scene: Scene, timeout_s: float) -> Stream:
    scene.gate.close()
    scheduler = scene.deployment.prefill[0]._parts.machine.core.scheduler

    def num_in_front() -> int:
        return len(scheduler.waiting) + scheduler.num_steps_in_flight  # each of these prompts fills a step

    first = Stream(scene.deployment.inference, prompt_of(next(NEW_SEEDS), num_tokens=64), num_output=5)
    await until(lambda: scene.gate.waiting, "another prompt is being computed")
    second = Stream(scene.deployment.inference, prompt_of(next(NEW_SEEDS), num_tokens=64), num_output=5)
    await until(lambda: num_in_front() == 2, "a second prompt is in the next step, or waits for that step")
    scene.let_go += [first.right, second.right]
    stream = scene.start(timeout_s)
    await until(lambda: num_in_front() == 3, "it waits behind both")
    assert scheduler.waiting, "it is in a step"
    return stream


async def computing(scene: Scene, timeout_s: float) -> Stream:
    scene.gate.close()
    stream = scene.start(timeout_s)
    await until(lambda: scene.gate.waiting, "it is being computed")
    await scene.offers(OwnerState.COMPUTING)
    await scene.pulls(PullerState.WANTING)
    return stream


async def offered_in_part(scene: Scene, timeout_s: float) -> Stream:
    scene.gate.close(after=1)
    counters = transfers(scene.deployment.decode[0]).counters
    num_reads = counters.num_reads
    stream = scene.start(timeout_s)
    await scene.offers(OwnerState.OFFERED)
    await until(lambda: counters.num_reads > num_reads, "its first chunk is read")
    await scene.pulls(PullerState.WANTING)
    return stream


async def reserved(scene: Scene, timeout_s: float) -> Stream:
    pool = scene.deployment.decode[0]._parts.machine.core.pool
    filled = pool.allocate(pool.num_available - 6)  # enough for the other one to grow
    assert filled is not None
    scene.let_go.append(lambda: pool.release(filled))
    stream = scene.start(timeout_s)
    await scene.pulls(PullerState.RESERVED)
    return stream


async def reading(scene: Scene, timeout_s: float) -> Stream:
    num_stalled = scene.fabric.faults_done["stall"]
    scene.fabric.stall_reads = True
    scene.let_go.append(lambda: setattr(scene.fabric, "stall_reads", False))
    stream = scene.start(timeout_s)
    await until(lambda: scene.fabric.faults_done["stall"] > num_stalled, "a read does not end")
    await scene.pulls(PullerState.READING)
    return stream


async def verifying(scene: Scene, timeout_s: float) -> Stream:
    """Everything is read, and nothing has told the puller yet that its lease covers that."""

    def without_acks(message: object) -> tuple[int, ...] | None:
        if isinstance(message, Heartbeat) and message.ack is not None:
            return ()
        return () if isinstance(message, Ready) else None

    scene.wire.rule = without_acks
    stream = scene.start(timeout_s)
    for sender, receiver, message in await _readys(scene):
        scene.fabric.inject(sender, receiver, encode(replace(message, ack=1 << 60)))  # of no message of the puller's
    await scene.pulls(PullerState.VERIFYING)
    return stream


async def _readys(scene: Scene) -> list[tuple[str, str, Ready]]:
    """Those that were held back, up to the last."""

    def held() -> list[tuple[str, str, Ready]]:
        decoded = ((s, r, scene.wire.read(payload)) for s, r, payload in scene.wire.kept)
        return [(s, r, message) for s, r, message in decoded if isinstance(message, Ready)]

    await until(lambda: any(ready.last for _, _, ready in held()), "all READYs are on the way")
    return held()


async def decoding(scene: Scene, timeout_s: float) -> Stream:
    stream = scene.start(timeout_s)
    return await stream.reach(4)


STATES: list[Hold] = [
    in_the_routers_queue,
    in_the_prefill_workers_queue,
    computing,
    offered_in_part,
    reserved,
    reading,
    verifying,
    decoding,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        fabric = MemoryFabric()
        patch.setattr(compose, "FABRIC", fabric)
        # A puller without answers gives up after two thirds of a lease; VERIFYING is to last longer than TIMEOUT_S.
        async with deploy(fault_config(lease_s=3 * LEASE_S)) as deployment:
            slow_down(deployment.decode[0], 0.01)
            yield Scene(deployment, fabric, Wire(fabric), Gate(deployment.prefill[0]))


@pytest_asyncio.fixture(loop_scope="module")
async def scene(running: Scene, hold: Hold) -> Scene:
    """Of one test: with a bystander of its own."""
    num_output = 400 if hold is in_the_routers_queue else 100  # the other request waits in the queue for its end
    prompt = prompt_of(next(NEW_SEEDS))
    running.bystander = await Stream(running.deployment.inference, prompt, num_output).reach(3)
    await until(lambda: not transfers(running.deployment.prefill[0]).num_alive, "its hand-off is over")
    running.let_go.clear()
    running.wire.kept.clear()
    return running


async def everything_ends_well(scene: Scene) -> None:
    scene.gate.open()
    scene.wire.rule = lambda _message: None
    for undo in scene.let_go:
        pending = undo()
        if asyncio.iscoroutine(pending):
            await pending
    await scene.bystander.right()
    await scene.deployment.settle()
    await serves_on(scene.deployment.inference)


@pytest.mark.parametrize("hold", STATES, ids=lambda hold: hold.__name__)
async def test_a_client_may_cancel_at_any_state(scene: Scene, hold: Hold) -> None:
    stream = await hold(scene, 20.0)
    assert not stream.ended
    stream.cancel()
    await stream.typed(grpc.StatusCode.CANCELLED)
    await everything_ends_well(scene)


@pytest.mark.parametrize("hold", STATES, ids=lambda hold: hold.__name__)
async def test_a_deadline_may_pass_at_any_state(scene: Scene, hold: Hold) -> None:
    started = time.monotonic()
    stream = await hold(scene, TIMEOUT_S)
    assert not stream.ended
    await stream.typed(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    await everything_ends_well(scene)
