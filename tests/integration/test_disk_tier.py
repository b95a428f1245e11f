"""A worker finds blocks on disk that it has evicted, or that an earlier process has left: the tokens are those of one
engine that nothing disturbs, and a disk that is wrong, broken or slow costs hits alone."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.config import CacheConfig, TandemConfig
from core.errors import ConfigError
from core.request import Request, SamplingParams
from tests.support.deployment import Deployment, busy_blocks, deploy, machine_of, tiny_config
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until
from worker.service import WorkerService
from worker.tier.disk_tier import DiskTier
from worker.tier.slot_file import DIRECTORY, SlotFile

PROMPT = tuple(range(3, 100))
NUM_OUTPUT = 24
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.875, "seed": 7}]
BLOCK_SIZE = 16
NUM_FULL = (len(PROMPT) - 1) // BLOCK_SIZE  # blocks of the prompt that a cache can give


@pytest.fixture(autouse=True)
def _a_read_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prompt faster than any disk reads it."""
    monkeypatch.setattr(DiskTier, "limit_s", lambda *_: 30.0)


def on_disk(path: Path, model: str = "fake:tiny") -> TandemConfig:
    return replace(tiny_config(model), cache=CacheConfig(disk_gb=0.1, disk_dir=str(path)))


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


def expected(config: TandemConfig, **sampling: Any) -> list[int]:
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True, **({"temperature": 0.0} | sampling))
    return CoLocatedEngine(config.engine).generate(Request("reference", PROMPT, len(PROMPT), params))


async def ask(deployment: Deployment, **options: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    answer = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT, **options)
    return answer.token_ids, answer.finished.usage.cached_tokens


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", ["fake:tiny", "random:llama-tiny"])
async def test_a_worker_that_starts_again_finds_its_blocks(
    tmp_path: Path, model: str, sampling: dict[str, Any]
) -> None:
    config = on_disk(tmp_path, model)
    tokens = expected(config, **sampling)
    async with serving(config) as deployment:
        assert await ask(deployment, **sampling) == (tokens, 0)
    async with serving(config) as deployment:
        assert await ask(deployment, **sampling) == (tokens, NUM_FULL * BLOCK_SIZE)
        assert tier_of(deployment.prefill[0]).counts.num_read == NUM_FULL
        assert await ask(deployment, **sampling) == (tokens, NUM_FULL * BLOCK_SIZE)
        assert tier_of(deployment.prefill[0]).counts.num_read == NUM_FULL, "the pool has the prefix again"


async def test_a_prompt_goes_to_the_worker_that_has_its_prefix_on_disk(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    async with serving(config) as deployment:
        await ask(deployment)
    (tmp_path / DIRECTORY / "prefill-0.kv").rename(tmp_path / DIRECTORY / "prefill-1.kv")
    async with deploy(config, num_prefill=2) as deployment:
        assert await ask(deployment) == (expected(config), NUM_FULL * BLOCK_SIZE)
        assert [tier_of(worker).counts.num_read for worker in deployment.prefill] == [0, NUM_FULL]
        await settle(deployment)


async def test_an_evicted_prefix_comes_back(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    async with serving(config) as deployment:
        await ask(deployment)
        await settle(deployment)
        deployment.drop_caches(deployment.workers)
        assert await ask(deployment) == (expected(config), NUM_FULL * BLOCK_SIZE)


async def test_a_prefix_comes_back_under_its_own_salt_alone(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    async with serving(config) as deployment:
        await ask(deployment, cache_salt="a")
    async with serving(config) as deployment:
        assert await ask(deployment, cache_salt="b") == (expected(config), 0)
        assert await ask(deployment) == (expected(config), 0)
        assert await ask(deployment, cache_salt="a") == (expected(config), NUM_FULL * BLOCK_SIZE)


async def test_damaged_bytes_are_a_miss_from_there_on(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    async with serving(config) as deployment:
        await ask(deployment)
        tier = tier_of(deployment.prefill[0])
        third = next(row.slot for row in tier.table._rows.values() if row.position == 2)
        slot_bytes = deployment.prefill[0]._parts.disk._file._slot_bytes  # type: ignore[union-attr]
        await settle(deployment)
    with (tmp_path / DIRECTORY / "prefill-0.kv").open("r+b") as file:
        file.seek(third * slot_bytes + slot_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    async with serving(config) as deployment:
        assert await ask(deployment) == (expected(config), 2 * BLOCK_SIZE)
        counts = tier_of(deployment.prefill[0]).counts
        assert (counts.num_read, counts.num_failures) == (2, 1)


async def test_a_disk_that_fails_costs_hits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_disk(tmp_path)
    failed: list[int] = []

    def broken(_: SlotFile, slot: int, *__: object) -> bool:
        failed.append(slot)
        raise OSError(errno.EIO, "broken")

    async with serving(config) as deployment:
        await ask(deployment)
    monkeypatch.setattr(SlotFile, "read", broken)
    monkeypatch.setattr(SlotFile, "write", broken)
    async with serving(config) as deployment:
        assert await ask(deployment) == (expected(config), 0)
        prefill, decode = (tier_of(worker) for worker in (deployment.prefill[0], deployment.decode[0]))
        assert failed
        assert prefill.counts.num_failures >= 1
        await until(lambda: decode._writes == (), "the write has ended")
        decode._news.clear()
        prefill._news.clear()


async def test_a_disk_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_disk(tmp_path)
    async with serving(config) as deployment:
        await ask(deployment)
    read, answers = SlotFile.read, threading.Event()

    def hangs(self: SlotFile, slot: int, name: bytes, target: memoryview) -> bool:
        answers.wait()
        return read(self, slot, name, target)

    monkeypatch.setattr(SlotFile, "read", hangs)
    monkeypatch.setattr(DiskTier, "limit_s", lambda *_: 0.05)
    async with serving(config) as deployment:
        assert await ask(deployment) == (expected(config), 0)
        machine = machine_of(deployment.prefill[0])
        await until(lambda: machine.idle, "a drain does not wait for the disk")
        assert not busy_blocks(deployment.prefill[0])
        assert tier_of(deployment.prefill[0]).price_s(0) > tier_of(deployment.decode[0]).price_s(0), "still in flight"
        answers.set()


async def test_two_workers_never_share_a_file(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    async with deploy(config) as first, deploy(config) as second:
        assert all(machine_of(worker).core.tier is not None for worker in first.workers)
        assert all(machine_of(worker).core.tier is None for worker in second.workers)
        assert (await ask(second))[0] == expected(config)


async def test_a_size_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    config = replace(tiny_config(), cache=CacheConfig(disk_gb=1e-6, disk_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"\[cache\] disk_gb = 1e-06 holds 0 KV blocks"):
        async with deploy(config):
            pass
