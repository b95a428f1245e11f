"""Running requests go on at a neighbour when their decode worker drains or runs short of blocks, over real gRPC and
nixl: with their KV, with nothing computed again, and with the tokens of one engine that nothing disturbs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from core.lifecycle import WorkerState
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import OutputFormat
from tests.support.deployment import Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.reference import CoLocatedEngine
from tests.support.steps import slow_down
from tests.support.streams import Streams
from tests.support.waiting import until
from worker.service import WorkerService

DRAIN_TIMEOUT_S = 20.0
NUM_OUTPUT = 90
STEP_S = 0.02  # a stream lasts for two seconds
PROMPTS = [tuple(range(1 + number, 40 + 3 * number)) for number in range(6)]
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 20}},
    "required": ["items"],
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.875, "presence_penalty": 0.5, "seed": 7}


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(transport="nixl"), num_decode=2) as running:
        for worker in running.decode:
            slow_down(worker, STEP_S)
        yield running


def expected(deployment: Deployment, prompt: tuple[int, ...], **sampling: Any) -> list[int]:
    return CoLocatedEngine(deployment.config.engine).tokens(prompt, NUM_OUTPUT, **sampling)


def by_load(deployment: Deployment) -> list[WorkerService]:
    """The decode workers, the one with most sequences first."""
    return sorted(deployment.decode, key=lambda worker: -len(machine_of(worker).core.scheduler.running))


async def drain(deployment: Deployment, worker: WorkerService) -> None:
    """The worker is idle long before its streams would have ended there."""
    began_at = asyncio.get_running_loop().time()
    await worker.drain(DRAIN_TIMEOUT_S)
    assert asyncio.get_running_loop().time() - began_at < DRAIN_TIMEOUT_S - 1.0, "it had work left"
    shell = deployment.router._shell
    record = shell.view.worker(deployment.id_of(worker))
    assert record is not None
    await until(lambda: record.load.state is WorkerState.DRAINING, "the router has the worker's last report")


async def test_streams_of_a_drained_worker_go_on_at_its_neighbour_with_nothing_computed_again(
    deployment: Deployment,
) -> None:
    requests = [make_request(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLED) for prompt in PROMPTS]
    streams = Streams(deployment, requests)
    await streams.reach(3)
    leaving, staying = by_load(deployment)
    await drain(deployment, leaving)
    finished = await streams.finished()
    moved = [end for end in finished if end.num_moves]
    assert moved, "no stream was on the drained worker"
    assert len(finished) == len(PROMPTS)
    for end in moved:
        assert end.path == inference_pb2.REQUEST_PATH_MIGRATED
        assert end.decode_worker == deployment.id_of(staying)
        assert end.transferred_bytes > 0
    assert [(end.recomputed_tokens, end.attempts) for end in finished] == [(0, 1)] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, streams.answers, strict=True):
        assert answer.token_ids == expected(deployment, prompt, **SAMPLED)
    await deployment.settle()


async def test_a_request_with_an_output_format_moves_in_the_middle_of_it(deployment: Deployment) -> None:
    form = OutputFormat(json_schema=json.dumps(SCHEMA))
    request = make_request(
        token_ids=PROMPTS[0], max_tokens=NUM_OUTPUT, ignore_eos=False, output_format=form, temperature=1.0, seed=3
    )
    (undisturbed,) = await deployment.generate_all(request)
    streams = Streams(deployment, [request] * 4)
    await streams.reach(3)
    leaving, _ = by_load(deployment)
    await drain(deployment, leaving)
    finished = await streams.finished()
    assert any(end.num_moves for end in finished)
    assert all(answer.token_ids == undisturbed.token_ids for answer in streams.answers)
    await deployment.settle()


async def test_sequences_move_from_a_full_pool_to_an_empty_one_instead_of_being_computed_again(
    deployment: Deployment,
) -> None:
    full, empty = deployment.decode
    known = list(deployment.endpoints.values())
    await deployment.router.set_workers([each for each in known if each.service_id != deployment.id_of(empty)])
    scheduler = machine_of(full).core.scheduler
    needed = sum(-(-(len(prompt) + NUM_OUTPUT) // scheduler.block_size) for prompt in PROMPTS)
    filled = scheduler.pool.allocate(scheduler.pool.num_available - int(needed / 1.3))
    assert filled is not None
    requests = [make_request(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLED) for prompt in PROMPTS]
    streams = Streams(deployment, requests)
    await streams.reach(3)
    await deployment.router.set_workers(known)
    finished = await streams.finished()
    assert [(end.recomputed_tokens, end.attempts) for end in finished] == [(0, 1)] * len(PROMPTS)
    assert scheduler.num_preemptions == 0
    moved = [end for end in finished if end.num_moves]
    assert moved, "the pool was large enough: nothing was tested"
    assert all(end.decode_worker == deployment.id_of(empty) for end in moved)
    for prompt, answer in zip(PROMPTS, streams.answers, strict=True):
        assert answer.token_ids == expected(deployment, prompt, **SAMPLED)
    scheduler.pool.release(filled)
    await deployment.settle()


async def test_a_drain_without_room_anywhere_waits(deployment: Deployment) -> None:
    streams = Streams(deployment, [make_request(token_ids=PROMPTS[0], max_tokens=NUM_OUTPUT)])
    await streams.reach(3)
    leaving, staying = by_load(deployment)
    pool = machine_of(staying).core.pool
    filled = pool.allocate(pool.num_available)
    assert filled is not None
    staying._feed.mark_changed()
    await asyncio.sleep(0.2)  # for its report
    await leaving.drain(DRAIN_TIMEOUT_S)
    (end,) = await streams.finished()
    assert (end.num_moves, end.attempts, end.recomputed_tokens) == (0, 1, 0)
    pool.release(filled)
    await deployment.settle()
