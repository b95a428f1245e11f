"""The runner of a GPU inside a whole deployment, on the host: its faults end a sequence or a worker, and no request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

import engine.factory
from core.config import EngineConfig, TandemConfig
from core.errors import DeviceLost
from core.request import Request, SamplingParams
from engine.gpu.runner import GpuRunner
from engine.model import Model, ModelInputs
from engine.runner import StepLimits
from tests.support.deployment import Answer, deploy, tiny_config
from tests.support.reference import CoLocatedEngine

NUM_OUTPUT = 12
LARGE, SMALL = tuple(range(3, 103)), tuple(range(50, 70))


def config() -> TandemConfig:
    tiny = tiny_config(model="random:llama3-tiny")
    scheduler = replace(tiny.scheduler, max_running=8)
    return replace(tiny, engine=replace(tiny.engine, kv_memory_mb=4, device="cpu"), scheduler=scheduler)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """The tokens of one engine, computed by torch."""
    reference = CoLocatedEngine(config().engine)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT)
    tokens = {
        prompt: reference.generate(Request(f"reference {len(prompt)}", prompt, len(prompt), sampling))
        for prompt in (LARGE, SMALL)
    }
    reference.close()
    return tokens


@pytest.fixture(autouse=True)
def _runners_of_a_gpu(expected: object, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - made before
    def build(config: EngineConfig, cache_dir: Any, limits: StepLimits, **_: object) -> GpuRunner:
        return GpuRunner(config, cache_dir, limits=limits)

    monkeypatch.setattr(engine.factory, "build_runner", build)


def attempts_of(answer: Answer) -> int:
    assert answer.finished is not None
    return answer.finished.attempts


async def test_a_prompt_without_memory_is_computed_elsewhere_beside_neighbours_that_do_not_notice(
    expected: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, refused = Model.compute, list[int]()

    def scarce(model: Model, inputs: ModelInputs) -> torch.Tensor:
        if len(inputs.token_ids) > 40 and len(refused) < 2:  # the whole step, then its part alone
            refused.append(len(inputs.token_ids))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return compute(model, inputs)

    async with deploy(config()) as deployment:
        monkeypatch.setattr(Model, "compute", scarce)
        small = asyncio.create_task(deployment.generate(token_ids=SMALL, max_tokens=NUM_OUTPUT))
        answer = await deployment.generate(token_ids=LARGE, max_tokens=NUM_OUTPUT)
        assert len(refused) == 2, "the memory was never scarce"
        assert (answer.token_ids, attempts_of(answer)) == (expected[LARGE], 2)
        neighbour = await small
        assert (neighbour.token_ids, attempts_of(neighbour)) == (expected[SMALL], 1)
        assert not any(worker._failure.done() for worker in deployment.workers)
        await deployment.settle()


async def test_a_lost_device_ends_its_worker_and_the_tokens_go_on(
    expected: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, lost = Model.compute, list[int]()

    def lose(model: Model, inputs: ModelInputs) -> torch.Tensor:
        if not lost:
            lost.append(len(inputs.token_ids))
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return compute(model, inputs)

    async with deploy(config(), num_prefill=2) as deployment:
        monkeypatch.setattr(Model, "compute", lose)
        answer = await deployment.generate(token_ids=LARGE, max_tokens=NUM_OUTPUT)
        assert lost, "no step failed"
        assert (answer.token_ids, attempts_of(answer)) == (expected[LARGE], 2)
        (victim,) = [worker for worker in deployment.workers if worker._failure.done()]
        assert isinstance(await victim.failed(), DeviceLost)
        await victim.stop()
        deployment.prefill.remove(victim)
        await deployment.settle()
