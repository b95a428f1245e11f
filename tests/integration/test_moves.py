"""Running requests go on at a neighbour when their decode worker drains to change its role, over real gRPC and nixl:
with their KV, with nothing computed again, and with the tokens of one engine that nothing disturbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from core.errors import WorkerUnavailable
from core.lifecycle import ServiceRole
from tandem_client.stubs import inference_pb2
from tests.support.deployment import (
    Answer,
    Deployment,
    deploy,
    machine_of,
    make_request,
    tiny_config,
    wait_until_known,
    wait_until_met,
)
from tests.support.reference import CoLocatedEngine
from tests.support.steps import slow_down
from tests.support.waiting import until
from worker.service import WorkerService

NUM_OUTPUT = 90
STEP_S = 0.02  # a stream lasts for two seconds
PROMPTS = [tuple(range(1 + number, 40 + 3 * number)) for number in range(16)]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.875, "presence_penalty": 0.5, "seed": 7}


class Streams:
    """Requests that are answered in the background."""

    def __init__(self, deployment: Deployment, requests: list[inference_pb2.GenerateRequest]) -> None:
        self._deployment = deployment
        self.answers = [Answer() for _ in requests]
        self._tasks = [asyncio.create_task(self._read(*pair)) for pair in zip(requests, self.answers, strict=True)]

    async def _read(self, request: inference_pb2.GenerateRequest, answer: Answer) -> None:
        async for response in self._deployment.inference.Generate(request, timeout=60.0):
            answer.take(response)

    async def reach(self, num_tokens: int) -> None:
        def enough() -> bool:
            return all(len(answer.token_ids) >= num_tokens for answer in self.answers)

        await until(enough, f"every stream has {num_tokens} tokens")

    async def finished(self) -> list[inference_pb2.Finished]:
        await asyncio.gather(*self._tasks)
        return [answer.finished for answer in self.answers]


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(transport="nixl"), num_decode=2) as running:
        for worker in running.decode:
            slow_down(worker, STEP_S)
        yield running


def expected(deployment: Deployment, prompt: tuple[int, ...], length: int = NUM_OUTPUT, **sampling: Any) -> list[int]:
    return CoLocatedEngine(deployment.config.engine).tokens(prompt, length, **sampling)


def by_load(deployment: Deployment) -> list[WorkerService]:
    """The decode workers, the one with most sequences first."""
    return sorted(deployment.decode, key=lambda worker: -len(machine_of(worker).core.scheduler.running))


async def known_as(deployment: Deployment, worker: WorkerService, role: ServiceRole) -> None:
    """The router has the worker in its new role, and the worker has met the others."""
    shell = deployment.router._shell
    view, worker_id = shell.view, deployment.id_of(worker)

    def is_known() -> bool:
        record = view.worker(worker_id)
        return record is not None and record.role is role and not record.leaves

    await until(is_known, f"the router knows {worker_id} as {role.value} worker")
    await wait_until_known(deployment.router, len(deployment.endpoints))
    await wait_until_met(deployment)


async def test_a_decode_worker_with_streams_becomes_a_prefill_worker_and_its_cache_stays_warm(
    deployment: Deployment,
) -> None:
    streams = Streams(
        deployment, [make_request(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLED) for prompt in PROMPTS]
    )
    await streams.reach(3)
    worker, staying = by_load(deployment)
    parts = worker._parts
    await deployment.switch_role(worker, ServiceRole.PREFILL)
    finished = await streams.finished()
    moved = [prompt for prompt, end in zip(PROMPTS, finished, strict=True) if end.num_moves]
    assert moved, "no stream was on the worker"
    for end in finished:
        if end.num_moves:
            assert (end.path, end.transferred_bytes > 0) == (inference_pb2.REQUEST_PATH_MIGRATED, True)
            assert end.decode_worker == deployment.id_of(staying)
    assert [(end.recomputed_tokens, end.attempts) for end in finished] == [(0, 1)] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, streams.answers, strict=True):
        assert answer.token_ids == expected(deployment, prompt, **SAMPLED)

    assert parts is not None
    assert (worker._parts.agent, worker._parts.executor) == (parts.agent, parts.executor)
    await known_as(deployment, worker, ServiceRole.PREFILL)
    known = [worker, *deployment.decode]  # so that no other worker computes the prompt
    await deployment.router.set_workers([deployment.endpoints[id(each)] for each in known])
    answer = await deployment.generate(token_ids=moved[-1], max_tokens=8)
    assert answer.token_ids == expected(deployment, moved[-1], 8)
    assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
    assert answer.finished.prefill_worker == deployment.id_of(worker)
    assert answer.finished.usage.cached_tokens == len(moved[-1]) // 16 * 16
    await deployment.settle()


async def test_a_worker_that_still_has_work_keeps_its_role(deployment: Deployment) -> None:
    streams = Streams(deployment, [make_request(token_ids=PROMPTS[0], max_tokens=NUM_OUTPUT)])
    await streams.reach(3)
    worker, _ = by_load(deployment)
    with pytest.raises(WorkerUnavailable, match="still has work"):
        await worker.switch_role(ServiceRole.PREFILL, 0.0)
    (end,) = await streams.finished()
    assert end.recomputed_tokens == 0
    assert worker._role is ServiceRole.DECODE
    await deployment.settle()
