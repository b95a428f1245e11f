"""A worker changes its role in its process, over real gRPC and nixl: its streams go on elsewhere with nothing computed
again, its prefix cache stays warm, and it serves in the new role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from core.errors import WorkerDrains, WorkerUnavailable
from core.lifecycle import ServiceRole
from runtime.rpc.grpc_server import error_from, open_channel
from tandem_client.stubs import inference_pb2, worker_pb2, worker_pb2_grpc
from tests.support.deployment import (
    Deployment,
    another_router,
    deploy,
    machine_of,
    make_request,
    tiny_config,
    wait_until_known,
    wait_until_met,
)
from tests.support.reference import CoLocatedEngine
from tests.support.steps import slow_down
from tests.support.streams import Streams
from tests.support.waiting import until
from worker.service import WorkerService

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
NUM_OUTPUT = 90
NUM_STREAMS = 16
STEP_S = 0.02  # a stream lasts for two seconds
PROMPTS = [tuple(range(1 + number, 40 + 3 * number)) for number in range(NUM_STREAMS)]


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(transport="nixl"), num_decode=2) as running:
        yield running


def expected(deployment: Deployment, prompt: tuple[int, ...], num_output: int) -> list[int]:
    return CoLocatedEngine(deployment.config.engine).tokens(prompt, num_output)


async def known_as(deployment: Deployment, worker: WorkerService, role: ServiceRole) -> None:
    """The router has the worker in its new role, and the worker has met the others."""
    shell = deployment.router._shell
    view, worker_id = shell.view, deployment.id_of(worker)

    def is_known() -> bool:
        record = view.worker(worker_id)
        return record is not None and record.role is role and not record.leaves

    await until(is_known, f"the router knows {worker_id} as {role.value} worker")
    await wait_until_known(deployment, len(deployment.endpoints))
    await wait_until_met(deployment)


async def test_a_decode_worker_with_streams_becomes_a_prefill_worker_and_its_cache_stays_warm(
    deployment: Deployment,
) -> None:
    for decode in deployment.decode:
        slow_down(decode, STEP_S)
    streams = Streams(deployment, [make_request(token_ids=prompt, max_tokens=NUM_OUTPUT) for prompt in PROMPTS])
    await streams.reach(3)
    worker = max(deployment.decode, key=lambda decode: len(machine_of(decode).core.scheduler.running))
    parts = worker._parts
    await deployment.switch_role(worker, P)
    finished = await streams.finished()
    moved = [prompt for prompt, end in zip(PROMPTS, finished, strict=True) if end.num_moves]
    assert moved, "no stream was on the worker"
    assert [(end.recomputed_tokens, end.attempts) for end in finished] == [(0, 1)] * NUM_STREAMS
    for prompt, answer in zip(PROMPTS, streams.answers, strict=True):
        assert answer.token_ids == expected(deployment, prompt, NUM_OUTPUT)

    assert parts is not None
    assert (worker._parts.agent, worker._parts.executor) == (parts.agent, parts.executor)
    await known_as(deployment, worker, P)
    staying = [worker, *deployment.decode]  # so that no other worker computes the prompt
    await deployment.router.set_workers([deployment.endpoints[id(each)] for each in staying])
    answer = await deployment.generate(token_ids=moved[-1], max_tokens=8)
    assert answer.token_ids == expected(deployment, moved[-1], 8)
    assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
    assert answer.finished.prefill_worker == deployment.id_of(worker)
    assert answer.finished.usage.cached_tokens == len(moved[-1]) // 16 * 16
    await deployment.settle()


async def test_an_idle_worker_goes_there_and_back_and_serves_after_each_switch(deployment: Deployment) -> None:
    (worker,) = deployment.prefill
    for number, role in enumerate((D, P)):
        if role is D:
            await deployment.switch_role(deployment.decode[0], P)
        await deployment.switch_role(worker, role)
        await known_as(deployment, worker, role)
        own = deployment.endpoints[id(worker)]
        others = [each for each in deployment.endpoints.values() if each.role is not role]  # so no peer takes its place
        await deployment.router.set_workers([own, *others])
        answers = await asyncio.gather(
            *(deployment.generate(token_ids=prompt[number:], max_tokens=8) for prompt in PROMPTS)
        )
        ends = [answer.finished for answer in answers]
        ids = {(end.prefill_worker if role is P else end.decode_worker) for end in ends if end is not None}
        assert own.service_id in ids
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == expected(deployment, prompt[number:], 8)
        await deployment.settle()


async def test_a_router_that_has_not_heard_of_the_switch_uses_the_other_workers_until_it_has(
    deployment: Deployment,
) -> None:
    async with another_router(deployment) as other:
        worker = deployment.decode[0]
        await deployment.switch_role(worker, P)
        for prompt in PROMPTS[:4]:
            answer = await other.generate(token_ids=prompt, max_tokens=8)
            assert answer.token_ids == expected(deployment, prompt, 8)
        await other.router.set_workers(list(deployment.endpoints.values()))
        await known_as(other, worker, P)
        await other.generate(token_ids=PROMPTS[0], max_tokens=8)
    await deployment.settle()


async def test_the_service_of_the_other_role_refuses_its_calls_and_they_may_be_retried(deployment: Deployment) -> None:
    worker = deployment.prefill[0]
    async with open_channel(deployment.endpoints[id(worker)].address, 1 << 20) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.StreamTokens(worker_pb2.StreamTokensRequest(stream_id=1, router_id="r"), timeout=5.0):
                pass
        error = error_from(refused.value)
    assert (type(error), str(error)) == (WorkerDrains, "this worker serves as prefill worker")
    assert error.retryable


async def test_a_worker_that_still_has_work_keeps_its_role(deployment: Deployment) -> None:
    for decode in deployment.decode:
        slow_down(decode, STEP_S)
    streams = Streams(deployment, [make_request(token_ids=PROMPTS[0], max_tokens=NUM_OUTPUT)])
    await streams.reach(3)
    worker = max(deployment.decode, key=lambda decode: len(machine_of(decode).core.scheduler.running))
    with pytest.raises(WorkerUnavailable, match="still has work"):
        await worker.switch_role(P, 0.0)
    (end,) = await streams.finished()
    assert end.recomputed_tokens == 0
    assert worker._role is D
    await deployment.settle()
