"""Drain and scale-down under load: streams that run move or end with the right tokens, new ones go elsewhere, health
says NOT_SERVING, and work that is left when the time is over ends typed or goes on elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.lifecycle import WorkerState
from runtime.rpc.grpc_server import open_channel
from tandem_client.stubs import inference_pb2_grpc
from tests.support.deployment import Deployment, another_router, deploy, machine_of, tiny_config
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.steps import Gate, slow_down
from tests.support.waiting import until
from worker.service import WorkerService

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE_S = 10.0
MAX_OPEN = 16
NEW_SEEDS = itertools.count(1000)  # of prompts that no cache knows


def num_sequences(worker: WorkerService) -> int:
    return len(machine_of(worker).core.open_calls.timelines)


def num_arrived(worker: WorkerService) -> int:
    return machine_of(worker).core.num_arrived


async def health_of(address: str) -> int:
    async with open_channel(address, 1 << 20) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
        return int(answer.status)


async def load(inference: inference_pb2_grpc.InferenceStub, over: asyncio.Event, streams: list[Stream]) -> None:
    """New requests one after the other until `over`, into `streams`; no more at once than a busy machine serves."""
    while not over.is_set():
        if sum(not stream.ended for stream in streams) < MAX_OPEN:
            streams.append(Stream(inference, prompt_of(next(NEW_SEEDS), 40), 5))
        await asyncio.sleep(0.03)


async def take_away(deployment: Deployment, *gone: WorkerService) -> None:
    """As a supervisor does once they have drained."""
    for worker in gone:
        await worker.stop()
        (deployment.prefill if worker in deployment.prefill else deployment.decode).remove(worker)
    await deployment.router.set_workers([deployment.endpoints[id(worker)] for worker in deployment.workers])


async def test_workers_that_drain_under_load_finish_what_they_have_and_get_nothing_new() -> None:
    # The time limits of a real fleet: with those of `fault_config`, a process that stops for 2 s loses its hand-offs.
    async with deploy(tiny_config(), num_prefill=2, num_decode=2) as deployment:
        leaving = (deployment.prefill[0], deployment.decode[0])
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        for worker in deployment.prefill:
            slow_down(worker, 0.05)
        early = [await Stream(deployment.inference, prompt_of(seed), 150).reach(2) for seed in range(4)]
        gate = Gate(leaving[0])
        gate.close()  # else the drain could end before the test observes it
        early += [Stream(deployment.inference, prompt_of(seed, 150), 60) for seed in range(10, 14)]

        def all_arrived() -> bool:
            pools = (deployment.prefill, deployment.decode)
            return all(sum(map(num_arrived, pool)) == len(early) for pool in pools)

        await until(all_arrived, "every request is on its workers")
        assert all(num_sequences(worker) > 0 for worker in leaving)
        over, late = asyncio.Event(), list[Stream]()
        loading = asyncio.create_task(load(deployment.inference, over, late))

        endpoints = [replace(deployment.endpoints[id(each)], draining=each in leaving) for each in deployment.workers]
        await deployment.router.set_workers(endpoints)  # first, as a supervisor: else they refuse late calls
        draining = asyncio.gather(*(worker.drain(PATIENCE_S) for worker in leaving))
        known = deployment.router._shell.view
        names = {deployment.id_of(worker) for worker in leaving}

        def drain_known() -> bool:
            draining = (record for record in known.workers() if record.load.state is WorkerState.DRAINING)
            return {record.worker_id for record in draining} == names

        await until(drain_known, "the router knows that the two drain")
        num_taken = [num_arrived(worker) for worker in leaving]
        for worker in leaving:
            assert await health_of(deployment.endpoints[id(worker)].address) == NOT_SERVING
        for worker in deployment.workers:
            if worker not in leaving:
                assert await health_of(deployment.endpoints[id(worker)].address) == SERVING
        assert not draining.done(), "the drain was over before anybody looked"
        gate.open()
        await draining
        assert not any(num_sequences(worker) for worker in leaving)
        assert [num_arrived(worker) for worker in leaving] == num_taken
        await take_away(deployment, *leaving)
        num_before = len(late)
        await until(lambda: len(late) > num_before + 5, "new requests come without the two")
        over.set()
        await loading

        for stream in early + late:
            await stream.right()
        ended = [stream.finished for stream in early]
        assert any(finished.num_moves for finished in ended), "nothing ran on the drained decode worker"
        assert all(finished.attempts == 1 for finished in ended), "a drained worker broke a stream"
        assert not any(finished.recomputed_tokens for finished in ended)
        assert late[-1].finished.decode_worker not in names
        await deployment.settle()
        await serves_on(deployment.inference)


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_what_a_decode_worker_has_left_after_its_drain_goes_on_elsewhere_or_ends_typed(
    num_decode: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = fault_config(worker_wait_s=0.3)
    async with deploy(config, num_decode=num_decode) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.02)
        streams = [await Stream(deployment.inference, prompt_of(seed), 150).reach(2) for seed in range(3)]
        (leaving, *others) = deployment.decode
        machine_of(leaving).moves.ask_to_leave = lambda _: []  # type: ignore[union-attr, method-assign]  # nothing moves
        num_left = num_sequences(leaving)
        assert num_left > 0
        with caplog.at_level(logging.WARNING):
            await leaving.drain(0.2)
        assert "still has work after draining for 0.2 s" in caplog.text
        assert num_sequences(leaving) == num_left
        assert not any(stream.ended for stream in streams)
        await take_away(deployment, leaving)
        if others:
            for stream in streams:
                await stream.right()
            attempts = [stream.finished.attempts for stream in streams]
            assert sorted(attempts) == [1] * (3 - num_left) + [2] * num_left
            await serves_on(deployment.inference)
        else:
            for stream in streams:
                await stream.typed(grpc.StatusCode.UNAVAILABLE)
        await deployment.settle()


async def test_a_router_that_drains_finishes_its_streams_and_takes_no_new_one() -> None:
    async with deploy(fault_config()) as deployment, another_router(deployment) as other:
        slow_down(deployment.decode[0], 0.01)
        bystander = await Stream(other.inference, prompt_of(1), 80).reach(2)
        streams = [await Stream(deployment.inference, prompt_of(seed), 200).reach(2) for seed in (2, 3)]
        streams.append(Stream(deployment.inference, prompt_of(4, 150), 20))
        shell = deployment.router._shell
        await until(lambda: shell.num_open == 3, "the router has all of them")
        watched = health_pb2_grpc.HealthStub(deployment.channel).Watch(
            health_pb2.HealthCheckRequest(service="tandem.v1.Inference"), timeout=PATIENCE_S
        )
        assert (await watched.read()).status == SERVING
        draining = asyncio.create_task(deployment.router.drain(PATIENCE_S))
        assert (await watched.read()).status == NOT_SERVING
        watched.cancel()
        assert not draining.done()
        async with open_channel(deployment.router_address, 1 << 20) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            await Stream(stub, prompt_of(5)).typed(grpc.StatusCode.UNAVAILABLE)
        for stream in streams:
            await stream.right()
        await draining
        await deployment.router.stop()
        await bystander.right()
        await other.settle()


async def test_streams_that_are_left_after_the_drain_of_a_router_end_with_a_status_that_clients_may_retry() -> None:
    async with deploy(fault_config()) as deployment, another_router(deployment) as other:
        slow_down(deployment.decode[0], 0.01)
        bystander = await Stream(other.inference, prompt_of(1), 120).reach(2)
        stream = await Stream(deployment.inference, prompt_of(2), 1000).reach(2)
        await deployment.router.drain(3.0)
        await deployment.router.stop()
        await stream.typed(grpc.StatusCode.UNAVAILABLE)
        assert stream.num_tokens > 10, "the stream had no time of its own"
        await bystander.right()
        await other.settle()
