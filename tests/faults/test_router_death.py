"""kill -9 of a router: its streams break with a status that clients may retry, the workers free every block, and the
next router at the same address serves.

The victim is a process. The workers, the router of the bystander and the gates are in the process of the test.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import pytest
import pytest_asyncio

from cli import compose
from core.handoff import PullerState
from kv_transfer.transports.memory_transport import MemoryFabric
from tests.support.deployment import SLACK_S, Deployment, busy_blocks, deploy, machine_of, transfers
from tests.support.faults import LEASE_S, Stream, fault_config, prompt_of, serves_on
from tests.support.ports import kept_port
from tests.support.processes import Fleet
from tests.support.steps import Gate, slow_down
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Scene:
    deployment: Deployment
    fabric: MemoryFabric
    fleet: Fleet  # of the router to be killed
    gate: Gate  # of the prefill worker

    def start(self, seed: int) -> Stream:
        return Stream(self.fleet.inference, prompt_of(seed, num_tokens=150), num_output=600)

    def states_of_pulls(self) -> list[object]:
        return [claim.state for claim in transfers(self.deployment.decode[0]).claims()]

    def claims_of_others(self, router_id: str) -> list[str]:
        """Names of the sequences and transfers on the workers that do not belong to requests of this router."""
        return [
            claim.name
            for worker in self.deployment.workers
            for claim in machine_of(worker).claims()
            if not claim.name.startswith(router_id)
        ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scene() -> AsyncIterator[Scene]:
    with pytest.MonkeyPatch.context() as patch, kept_port("127.0.0.1") as port:
        fabric = MemoryFabric()
        patch.setattr(compose, "FABRIC", fabric)
        config = fault_config()
        async with deploy(config) as deployment:
            slow_down(deployment.decode[0], 0.01)
            config = replace(config, router=replace(config.router, port=port))
            workers = list(deployment.endpoints.values())
            async with Fleet.start(config, {}, others=workers) as fleet:
                yield Scene(deployment, fabric, fleet, Gate(deployment.prefill[0]))


async def decoding(scene: Scene) -> Stream:
    return await scene.start(seed=1).reach(4)


async def reading(scene: Scene) -> Stream:
    """One of three chunks is offered, and its read does not end."""
    scene.gate.close(after=1)
    scene.fabric.stall_reads = True
    stream = scene.start(seed=2)
    await until(lambda: scene.fabric.faults_done["stall"], "a read does not end")
    await until(lambda: scene.states_of_pulls() == [PullerState.READING], "it is the only read")
    assert busy_blocks(scene.deployment.prefill[0])
    return stream


async def waiting_for_the_prefill_worker(scene: Scene) -> Stream:
    stream = scene.start(seed=3)
    await until(lambda: scene.states_of_pulls() == [PullerState.READING, PullerState.WANTING], "it wants blocks")
    await until(lambda: scene.gate.waiting, "a step waits")
    return stream


async def test_a_killed_router_breaks_its_own_streams_alone_and_leaves_nothing_on_the_workers(scene: Scene) -> None:
    router = scene.deployment.router._shell
    bystander = await Stream(scene.deployment.inference, prompt_of(10), 600, timeout_s=60.0).reach(3)
    await until(lambda: not transfers(scene.deployment.prefill[0]).num_alive, "the bystander's hand-off is over")
    streams = [await hold(scene) for hold in (decoding, reading, waiting_for_the_prefill_worker)]
    address = scene.fleet.services["router-0"].endpoint["address"]

    await scene.fleet.kill("router-0")
    for stream in streams:
        await stream.typed(grpc.StatusCode.UNAVAILABLE)
    scene.gate.open()
    scene.fabric.stall_reads = False
    kept = functools.partial(scene.claims_of_others, f"{router.router_id}.")
    await until(lambda: not kept(), lambda: f"the workers keep {kept()}", seconds=LEASE_S + SLACK_S)
    assert not bystander.ended
    await bystander.right()
    assert bystander.finished.attempts == 1
    await scene.deployment.settle()

    await scene.fleet.heal()
    assert scene.fleet.services["router-0"].endpoint["address"] == address
    again = await Stream(scene.fleet.inference, streams[1].prompt).right()
    assert again.finished.attempts == 1
    await serves_on(scene.deployment.inference)
