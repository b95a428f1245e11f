"""Something happens to the file of a tier below the pool, under a worker that serves: the next prompts have the tokens
of one engine, no block is left, and another process of the worker starts with what it finds.

Blocks that are torn, damaged or another's are in tests/property/test_slot_file.py, the states of a read and a write in
tests/simulation/test_every_disk_state.py."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.test_prefixes import (
    NUM_BLOCKS,
    NUM_CACHED,
    PROMPT,
    SAMPLING,
    ask,
    expected,
    on_disk,
    serving,
    settle,
    tier_of,
)
from tests.support.deployment import Deployment, tiny_config
from tests.support.limits import no_file_larger_than
from worker.service import WorkerService
from worker.tier import disk_tier
from worker.tier.disk_tier import DiskTier
from worker.tier.slot_file import DIRECTORY, PAGE_BYTES


@dataclass
class Kept:
    """The file of one worker."""

    worker: WorkerService
    path: Path


def cut(kept: Kept) -> None:
    os.truncate(kept.path, 0)


def without_its_directory(kept: Kept) -> None:
    shutil.rmtree(kept.path.parent, ignore_errors=True)


def replaced(kept: Kept) -> None:
    kept.path.rename(kept.path.with_suffix(".old"))
    kept.path.write_bytes(b"another program's" * 1000)


def full(_: Kept) -> AbstractContextManager[None]:
    """No slot can be written; a disk is full so for every process."""
    return no_file_larger_than(PAGE_BYTES)


@dataclass(frozen=True)
class Case:
    happen: Callable[[Kept], AbstractContextManager[None] | None]
    num_cached: int = 0  # tokens of the prompt afterwards
    num_failures: int = 1  # of reads or writes, at least
    num_left: int | None = None  # tokens of the prompt that the next process finds; None: any


CASES = [
    Case(cut),
    Case(without_its_directory, NUM_CACHED, 0, 0),  # the process has the file as long as it lives
    Case(replaced, NUM_CACHED, 0, 0),
    Case(full, NUM_CACHED, 1, NUM_CACHED),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.happen.__name__)
async def test_the_file_of_a_worker_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(DiskTier, "limit_s", _always_reads)
    monkeypatch.setattr(disk_tier, "FIRST_PAUSE_S", 0.1)  # of writes; the test waits for it
    config = on_disk(tmp_path, tiny_config())
    tokens = expected(config.engine)
    async with serving(config) as deployment:
        assert await ask(deployment) == (tokens, 0)
        await settle(deployment)
        assert len(tier_of(deployment.prefill[0]).table) >= NUM_BLOCKS
        deployment.drop_caches(deployment.workers)
        with contextlib.ExitStack() as stack:
            for kept in _files(deployment, tmp_path):
                until = case.happen(kept)
                if until is not None:
                    stack.enter_context(until)
            found, num_cached = await ask(deployment)
            assert found == tokens
            assert num_cached == case.num_cached
            await deployment.settle()
            other = await deployment.generate(token_ids=PROMPT[::-1], max_tokens=4, **SAMPLING)  # has blocks to write
            await settle(deployment)
        assert tier_of(deployment.prefill[0]).counts.num_failures >= case.num_failures
        deployment.drop_caches(deployment.workers)
        assert (await ask(deployment))[0] == tokens
    async with serving(config) as deployment:
        found, num_left = await ask(deployment)
        assert found == tokens
        assert case.num_left in (None, num_left)
        again = await deployment.generate(token_ids=PROMPT[::-1], max_tokens=4, **SAMPLING)
        assert again.token_ids == other.token_ids == expected(config.engine, PROMPT[::-1])[:4]


def _always_reads(tier: DiskTier, num_blocks: int, compute_s: float, now: float) -> float | None:  # noqa: ARG001
    """A tiny model computes faster than any disk reads. But a failure pauses the reads."""
    return None if now < tier._read_pause.until else 30.0


def _files(deployment: Deployment, disk_dir: Path) -> list[Kept]:
    names = {worker: deployment.id_of(worker).partition(".")[0] for worker in deployment.workers}
    return [Kept(worker, disk_dir / DIRECTORY / f"{name}.kv") for worker, name in names.items()]
