"""A worker has a prefix from the cache of a peer, over real gRPC and nixl, or from its disk, where it has evicted it or
an earlier process has left it: the tokens are those of one engine that nothing disturbs.

Faults and deaths of either side, in each state of a read, are in tests/simulation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.config import CacheConfig, EngineConfig, TandemConfig
from core.request import Request, SamplingParams
from tests.support.deployment import Answer, Deployment, busy_blocks, deploy, machine_of, make_request, tiny_config
from tests.support.eager_reads import route_eagerly
from tests.support.faults import fault_config
from tests.support.processes import Fleet
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until
from worker.service import WorkerService
from worker.tier.disk_tier import DiskTier

PROMPT = tuple(range(3, 100))
NUM_OUTPUT = 24
BLOCK_SIZE = 16
NUM_BLOCKS = (len(PROMPT) - 1) // BLOCK_SIZE  # of the prompt, that a cache can give
NUM_CACHED = NUM_BLOCKS * BLOCK_SIZE  # tokens
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.875, "seed": 7}
MODELS = ["fake:tiny", "random:llama-tiny"]


def expected(engine: EngineConfig, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True, **SAMPLING)
    return CoLocatedEngine(engine).generate(Request("reference", prompt, len(prompt), params))


# ---- a peer


@pytest_asyncio.fixture(params=MODELS)
async def deployment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """A tiny model computes a prefix faster than any call takes, so here the router reads wherever it can."""
    route_eagerly(monkeypatch, late_s=30.0)
    config = tiny_config(request.param, transport="nixl", peer_prefixes="auto")
    transfer = replace(config.transfer, max_blocks_per_read=2, max_reads_in_flight=1)  # several reads of one prefix
    async with deploy(replace(config, transfer=transfer)) as running:
        yield running


async def first_turn(deployment: Deployment, **options: Any) -> tuple[int, ...]:
    """The history of a second turn. The decode worker has the KV of the first answer, the prefill worker has not."""
    first = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT, **options)
    await deployment.settle()
    await until(lambda: deployment.caches_are_known, "the router knows the caches")
    return (*PROMPT, *first.token_ids, 5, 6, 7)


async def test_turn_two_reads_the_history_from_the_decode_worker(deployment: Deployment) -> None:
    history = await first_turn(deployment)
    answer = await deployment.generate(token_ids=history, max_tokens=NUM_OUTPUT, **SAMPLING)
    assert answer.token_ids == expected(deployment.config.engine, history)
    read_tokens = answer.finished.receipt.read_tokens
    assert read_tokens >= BLOCK_SIZE
    assert answer.finished.usage.cached_tokens >= NUM_CACHED + read_tokens
    await deployment.settle()


async def test_a_salted_history_is_read_under_its_salt_alone(deployment: Deployment) -> None:
    history = await first_turn(deployment, cache_salt="a")
    options: dict[str, Any] = {"token_ids": history, "max_tokens": 4} | SAMPLING
    other, same = [await deployment.generate(**options, cache_salt=salt) for salt in "ba"]
    assert (other.finished.receipt.read_tokens, same.finished.receipt.read_tokens > 0) == (0, True)
    assert other.token_ids == same.token_ids == expected(deployment.config.engine, history)[:4]


# ---- a disk


@pytest.fixture
def a_read_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prompt faster than any disk reads it."""
    monkeypatch.setattr(DiskTier, "limit_s", lambda *_: 30.0)


def on_disk(path: Path, config: TandemConfig) -> TandemConfig:
    return replace(config, cache=CacheConfig(disk_gb=0.1, disk_dir=str(path)))


def tier_of(worker: WorkerService) -> DiskTier:
    tier = machine_of(worker).core.tier
    assert tier is not None
    return tier


@asynccontextmanager
async def serving(config: TandemConfig) -> AsyncIterator[Deployment]:
    async with deploy(config) as deployment:
        yield deployment
        await settle(deployment)


async def settle(deployment: Deployment) -> None:
    """Until every cached block has been written, or has been given up."""
    await deployment.settle()
    for worker in deployment.workers:
        tier = tier_of(worker)
        await until(lambda tier=tier: not (tier._news or tier._writes), "every block is written")  # type: ignore[misc]
        assert not busy_blocks(worker)
        machine_of(worker).check()


async def ask(deployment: Deployment) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    answer = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT, **SAMPLING)
    return answer.token_ids, answer.finished.usage.cached_tokens


@pytest.mark.usefixtures("a_read_always_pays")
@pytest.mark.parametrize("model", MODELS)
async def test_a_worker_that_starts_again_finds_its_blocks(tmp_path: Path, model: str) -> None:
    config = on_disk(tmp_path, tiny_config(model))
    async with serving(config) as deployment:
        tokens, num_cached = await ask(deployment)
        assert num_cached == 0
    async with serving(config) as deployment:
        assert await ask(deployment) == (tokens, NUM_CACHED)
        assert tier_of(deployment.prefill[0]).counts.num_read == NUM_BLOCKS
        assert await ask(deployment) == (tokens, NUM_CACHED)
        assert tier_of(deployment.prefill[0]).counts.num_read == NUM_BLOCKS, "the pool has the prefix again"
    assert tokens == expected(config.engine)


async def answer_of(fleet: Fleet) -> Answer:
    answer = Answer()
    async for response in fleet.inference.Generate(make_request(token_ids=PROMPT, max_tokens=8), timeout=60.0):
        answer.take(response)
    return answer


async def test_a_killed_worker_finds_its_blocks_on_its_disk(tmp_path: Path) -> None:
    """kill -9 of its process: the next one answers from what the killed one has left."""
    async with Fleet.start(on_disk(tmp_path, fault_config()), {"decode": 1}) as fleet:
        first = await answer_of(fleet)
        assert first.finished.usage.cached_tokens == 0
        await until(
            lambda: fleet.services["decode-0"].load.num_disk_writes >= NUM_BLOCKS,
            "the blocks are written",
        )
        await fleet.kill("decode-0")
        await fleet.heal()
        again = await answer_of(fleet)
        assert again.token_ids == first.token_ids
        assert again.finished.usage.cached_tokens == NUM_CACHED
        await until(lambda: fleet.services["decode-0"].load.num_disk_reads == NUM_BLOCKS, "the reads are reported")
