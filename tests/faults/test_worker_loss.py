"""A worker that goes away takes no request with it: another one continues at the next token."""

from __future__ import annotations

import asyncio

import pytest

from core.config import LiveConfig, WorkerConfig
from core.errors import DeviceLost
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, machine_of, tiny_config
from tests.support.device_runner import put_pools_on_devices
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.steps import Gate, runner_of, slow_down
from tests.support.waiting import until
from worker.service import WorkerService

NUM_OUTPUT = 300  # three seconds at least, where steps are slowed down to 10 ms


async def lost(deployment: Deployment, victim: WorkerService) -> None:
    view, name = deployment.router._shell.view, deployment.id_of(victim)
    await until(lambda: view.worker(name) is None, "the router has lost the worker")


async def goes_on_without(deployment: Deployment, victim: WorkerService) -> None:
    await lost(deployment, victim)
    await victim.stop()
    deployment.decode.remove(victim)
    await serves_on(deployment.inference)
    await deployment.settle()


async def a_stream_on_each(deployment: Deployment) -> dict[int, Stream]:
    """Two streams in the middle of their tokens, by id() of their decode worker."""
    streams: dict[int, Stream] = {}
    for seed in (1, 2):
        stream = await Stream(deployment.inference, prompt_of(seed), NUM_OUTPUT).reach(3)
        (busy,) = [w for w in deployment.decode if machine_of(w).core.scheduler.running and id(w) not in streams]
        streams[id(busy)] = stream
    return streams


async def test_a_step_that_hangs_fails_its_worker_and_the_request_goes_elsewhere() -> None:
    """Its limit is lowered while it runs."""
    async with deploy(tiny_config(), num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        streams = await a_stream_on_each(deployment)
        victim, other = deployment.decode
        gate = Gate(victim)
        gate.close()
        await until(lambda: gate.waiting, "a step hangs")
        victim.set_config(LiveConfig(worker=WorkerConfig(step_timeout_s=2.5)))
        error = await asyncio.wait_for(victim.failed(), 30)
        assert "step_timeout_s" in str(error)
        for stream in streams.values():
            assert (await stream.right()).finished.decode_worker == deployment.id_of(other)
        await lost(deployment, victim)
        gate.open()
        await goes_on_without(deployment, victim)


async def test_a_lost_device_ends_its_worker_and_its_requests_go_on_at_the_next_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deploy(tiny_config(), num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        streams = await a_stream_on_each(deployment)
        victim, other = deployment.decode
        num_lost = 0

        def lose(*_: object) -> None:
            nonlocal num_lost
            num_lost += 1
            raise DeviceLost("an illegal memory access was encountered")

        monkeypatch.setattr(runner_of(victim), "_compute", lose)
        error = await asyncio.wait_for(victim.failed(), 10)
        assert isinstance(error, DeviceLost)
        assert num_lost == 1, "a lost device gets a second step"
        moved = (await streams[id(victim)].right()).finished
        assert moved.attempts == 2
        assert moved.path == inference_pb2.REQUEST_PATH_RECOMPUTED
        assert moved.decode_worker == deployment.id_of(other)
        assert (await streams[id(other)].right()).finished.attempts == 1
        await goes_on_without(deployment, victim)


async def test_a_device_that_is_lost_during_a_hand_off_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs no step for a prompt that it cannot pull, so no step would tell it of the loss."""
    put_pools_on_devices(monkeypatch)
    num_lost = 0

    def lose(*_: object) -> tuple[int, ...]:
        nonlocal num_lost
        num_lost += 1
        raise DeviceLost("digests: an illegal memory access was encountered")

    async with deploy(fault_config(transport="nixl", local_prefill="never"), num_decode=2) as deployment:
        victim, other = deployment.decode
        monkeypatch.setattr(runner_of(victim).memory, "digests", lose)
        streams = [Stream(deployment.inference, prompt_of(seed), NUM_OUTPUT) for seed in range(1, 7)]
        for stream in streams:
            finished = (await stream.right()).finished
            assert finished.decode_worker == deployment.id_of(other)
        assert num_lost == 1, "no digest failed, or the agent went on after the loss"
        assert "illegal memory access" in str(await asyncio.wait_for(victim.failed(), 10))
        await goes_on_without(deployment, victim)
