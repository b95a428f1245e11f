"""kill -9 and SIGSTOP of real workers that hand KV over real UCX, by nixl and by ucxx: during a transfer, and after it.

tests/simulation/test_every_move_state.py breaks either side in every state of a hand-off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem_client.stubs import cluster_pb2, inference_pb2
from tests.integration.transfer_owner_process import real_transport
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.processes import Fleet, FleetProcess
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_SCENES = 5
STEP_S = {"prefill": 0.3, "decode": 0.02}  # a prompt of three chunks takes 0.9 s, 40 tokens take 0.8 s
NUM_OUTPUT = 40
# A bystander must keep its attempt on a busy machine: a hand-off outlives a process that is not run for a third of a
# lease, and a worker one of LOST_S.
LEASE_S = 6.0
LOST_S = 8.0
LEASE_MARGIN_S = 0.2  # a stopped worker is stopped for this much longer than its lease lasts


class Fleets(contextlib.AsyncExitStack):
    """One fleet for each transport, started for its first test. pytest would start one again and again: it groups tests
    by each of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, Fleet] = {}

    async def over(self, transport: str) -> Fleet:
        real_transport(transport)
        if transport not in self._running:
            starting = Fleet.start(
                fault_config(transport, lease_s=LEASE_S, worker_lost_s=LOST_S), {"prefill": 2, "decode": 2}, STEP_S
            )
            self._running[transport] = await self.enter_async_context(starting)
        return self._running[transport]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleets() -> AsyncIterator[Fleets]:
    async with Fleets() as fleets:
        yield fleets


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(fleets: Fleets, transport: str) -> AsyncIterator[Fleet]:
    """Everyone is there and idle; afterwards, too."""
    running = await fleets.over(transport)
    await running.heal()
    await running.settle()
    yield running
    await running.settle()
    await serves_on(running.inference)


def bytes_pulled(fleet: Fleet, but: FleetProcess) -> int:
    return sum(int(service.load.transferred_bytes) for service in fleet.pool("decode") if service is not but)


async def called(fleet: Fleet, role: str, but: FleetProcess | None = None) -> list[FleetProcess]:
    """The workers of this role, other than `but`, that have a call now. The router knows; the loads may be older."""
    workers = (await fleet.cluster.GetFleet(cluster_pb2.GetFleetRequest())).workers
    names = {worker.worker_id for worker in workers if worker.num_dispatched}
    return [found for found in fleet.pool(role) if found is not but and found.endpoint.service_id in names]


async def only_called(fleet: Fleet, role: str, stream: Stream, but: FleetProcess | None = None) -> FleetProcess | None:
    """The worker of this role that has the call of `stream`. None if the stream has ended before that was seen."""
    while not stream.ended:
        for found in await called(fleet, role, but):
            return found
    return None


each_transport = pytest.mark.parametrize("transport", ["nixl", "ucxx"])


class Scene:
    """A request at a moment of its hand-off, and another one in the middle of its tokens on another decode worker."""

    fleet: Fleet
    stream: Stream
    bystander: Stream
    decode: FleetProcess
    prefill: FleetProcess
    elsewhere: FleetProcess  # the decode worker of the bystander
    pulled_before: int  # bytes

    @classmethod
    async def at(cls, fleet: Fleet, moment: str, seed: int) -> Scene:
        """On a busy machine the moment may have passed before it is seen. Then the scene ends, and another begins."""
        for prompt_seed in range(seed, seed + 10 * MAX_SCENES, 10):
            scene = cls()
            if await scene._begins(fleet, prompt_seed) and await scene._reaches(moment):
                return scene
            await scene.stream.right()
            await scene.bystander.right()
            await fleet.settle()
        raise AssertionError(f"{MAX_SCENES} scenes have missed their moment")

    async def _begins(self, fleet: Fleet, seed: int) -> bool:
        """Start both streams. False if one has ended before it was seen on its workers."""
        self.fleet = fleet
        self.stream = self.bystander = await Stream(fleet.inference, prompt_of(seed + 1, 30), 80).reach(2)
        elsewhere = await only_called(fleet, "decode", self.bystander)
        if elsewhere is None:
            return False
        async with asyncio.timeout(30):
            while await called(fleet, "prefill"):
                pass  # the answer to the bystander's call is on its way
        self.pulled_before = bytes_pulled(fleet, elsewhere)
        self.stream = Stream(fleet.inference, prompt_of(seed, 180), NUM_OUTPUT)
        prefill = await only_called(fleet, "prefill", self.stream)
        decode = await only_called(fleet, "decode", self.stream, but=elsewhere)
        if prefill is None or decode is None:
            return False
        self.elsewhere, self.prefill, self.decode = elsewhere, prefill, decode
        return True

    async def _reaches(self, moment: str) -> bool:
        """Wait for the moment. False if it is over already."""

        def pulled() -> int:
            return bytes_pulled(self.fleet, self.elsewhere) - self.pulled_before

        if moment == "during":
            # A process that is not run for LOST_S is lost; then the stream has its tokens from another attempt.
            await until(lambda: pulled() > 0 or self.stream.num_tokens, "the first blocks, or a token, are there")
            return self.decode.load.num_transfers == 1 and self.stream.num_tokens == 0
        await self.stream.reach(3)
        return self.stream.num_tokens < NUM_OUTPUT - 5

    async def ends_well(self, *, attempts: int) -> None:
        for stream, num_attempts in ((self.stream, attempts), (self.bystander, 1)):
            await stream.right()
            assert stream.finished.attempts == num_attempts, await self.fleet.failures_of(stream.finished.request_id)


@each_transport
async def test_a_killed_prefill_worker(fleet: Fleet) -> None:
    scene = await Scene.at(fleet, "during", seed=100)
    await fleet.kill(scene.prefill.name)
    await scene.ends_well(attempts=2)


# After the transfer, all transports are alike.
@pytest.mark.parametrize(("transport", "moment"), [("nixl", "during"), ("nixl", "after"), ("ucxx", "during")])
async def test_a_killed_decode_worker(fleet: Fleet, moment: str) -> None:
    scene = await Scene.at(fleet, moment, seed=200 + len(moment))
    await fleet.kill(scene.decode.name)
    await scene.ends_well(attempts=2)


@pytest.mark.parametrize(("transport", "role"), [("nixl", "prefill"), ("nixl", "decode"), ("ucxx", "decode")])
async def test_a_worker_stopped_for_longer_than_the_lease(fleet: Fleet, role: str) -> None:
    scene = await Scene.at(fleet, "during", seed=300 + len(role))
    victim = scene.prefill if role == "prefill" else scene.decode

    def num_expired() -> int:
        return sum(service.load.num_expired_leases for service in fleet.pool("prefill"))

    expired = num_expired()
    async with fleet.stopped(victim.name):
        stopped_at = time.monotonic()
        await scene.stream.end()  # elsewhere
        if role == "decode":
            await until(lambda: num_expired() == expired + 1, "the owner keeps its blocks for nobody", 2 * LEASE_S)
        await asyncio.sleep(max(0.0, stopped_at + LEASE_S + LEASE_MARGIN_S - time.monotonic()))
    await scene.ends_well(attempts=2)
    await fleet.settle()  # also the one that slept
    await fleet.publish()  # and the router has it back


@each_transport
async def test_workers_that_restart_under_their_names_hand_off_to_those_that_knew_the_old_ones(fleet: Fleet) -> None:
    before = {service.name: service.endpoint.service_id for service in fleet.pool("prefill")}
    for name in before:
        await fleet.kill(name)
    await fleet.heal()
    after = {service.name: service.endpoint.service_id for service in fleet.pool("prefill")}
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values()), "they are the old ones"
    stream = await Stream(fleet.inference, prompt_of(500, 180), 5).right()
    assert stream.finished.attempts == 1, await fleet.failures_of(stream.finished.request_id)
    assert stream.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
    assert stream.finished.transferred_bytes > 0
