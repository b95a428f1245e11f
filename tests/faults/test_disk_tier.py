"""kill -9 of a worker with a disk: its next process answers from what the killed one has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core.config import CacheConfig
from tests.support.deployment import Answer, make_request
from tests.support.faults import fault_config
from tests.support.processes import Fleet
from tests.support.waiting import until

PROMPT = tuple(range(3, 100))
NUM_CACHED = 96  # of its tokens: full blocks of 16


async def answer_of(fleet: Fleet) -> Answer:
    answer = Answer()
    async for response in fleet.inference.Generate(make_request(token_ids=PROMPT, max_tokens=8), timeout=60.0):
        answer.take(response)
    return answer


async def test_a_killed_worker_finds_its_blocks_on_disk(tmp_path: Path) -> None:
    config = replace(fault_config(), cache=CacheConfig(disk_gb=0.1, disk_dir=str(tmp_path)))
    async with Fleet.start(config, {"decode": 1}) as fleet:
        first = await answer_of(fleet)
        assert first.finished.usage.cached_tokens == 0
        await until(
            lambda: fleet.services["decode-0"].load.num_disk_writes >= NUM_CACHED // 16, "the blocks are written"
        )
        await fleet.kill("decode-0")
        await fleet.heal()
        again = await answer_of(fleet)
        assert again.token_ids == first.token_ids
        assert again.finished.usage.cached_tokens == NUM_CACHED
        await until(
            lambda: fleet.services["decode-0"].load.num_disk_reads == NUM_CACHED // 16, "the reads are reported"
        )
