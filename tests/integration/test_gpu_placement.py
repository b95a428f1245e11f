"""A real Ray places workers on GPUs: one each, or a share of one. The GPUs are pretended; no CUDA call is made.

RAY_OVERRIDE_RESOURCES makes Ray believe in GPUs. CUDA_VISIBLE_DEVICES numbers them 4 and 5. A worker with a GPU of
Ray's sees one number; a worker that inherits the variable sees both.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.commands.serve import fleet as serve_fleet
from core.config import ClusterConfig
from core.errors import ConfigError
from core.lifecycle import ServiceRole
from fleet.law.claims import GpuUse
from fleet.law.events import FleetReady, FleetStopped
from fleet.ray.cluster import Cluster, connect
from tests.integration.fake_services import Journal, fake_fleet, wait_for_message, wait_for_update
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = ClusterConfig(max_workers=4, restart_backoff_s=0.2)
ALL_GPUS = ["4", "5"]
PRETENDED = {
    "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": len(ALL_GPUS), "accelerator_type:H100": 1}),
    "CUDA_VISIBLE_DEVICES": ",".join(ALL_GPUS),
}


@pytest.fixture(scope="module")
def pretended_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PRETENDED.items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ray_here(pretended_gpus: None) -> AsyncIterator[Cluster]:
    """One Ray for all tests of this file: each start takes seconds."""
    del pretended_gpus
    cluster = connect(CONFIG)
    yield cluster
    cluster.close()


@contextlib.asynccontextmanager
async def fleet(
    cluster: Cluster, path: Path, config: ClusterConfig, use: GpuUse = GpuUse.IF_PRESENT
) -> AsyncIterator[Journal]:
    """A fleet of fake services that serve."""
    async with Journal.open(path) as journal:
        await cluster.start(replace(fake_fleet(path, config), gpu_use=use))
        try:
            await wait_for_update(cluster, FleetReady)
            yield journal
            await cluster.shutdown()
            await wait_for_update(cluster, FleetStopped)
        finally:
            await cluster.leave()


async def gpus_of(journal: Journal, *names: str) -> list[tuple[object, object]]:
    """For each service, its share and the GPUs that it sees."""
    started = [await journal.start_of(name) for name in names]
    return [(start["gpus"], start["visible_gpus"]) for start in started]


async def test_each_worker_has_a_gpu_of_its_own_that_it_keeps_and_one_beyond_the_last_waits_and_the_operator_learns_why(
    ray_here: Cluster, tmp_path: Path
) -> None:
    async with fleet(ray_here, tmp_path / "journal", CONFIG) as journal:
        router, *workers = await gpus_of(journal, "router-0", "prefill-0", "decode-0")
        assert router == (0.0, "")
        assert sorted(workers) == [(1.0, gpu) for gpu in ALL_GPUS]

        before = await journal.start_of("decode-0")
        await journal.wait_for(event="workers", workers=["decode-0", "prefill-0"])
        os.kill(int(str(before["pid"])), 9)
        after = await journal.start_after(before)
        assert after["visible_gpus"] == before["visible_gpus"], "the other GPU is taken"
        await journal.wait_for(event="workers", workers=["decode-0", "prefill-0"])

        await ray_here.control.scale({ServiceRole.DECODE: 2})
        await wait_for_message(ray_here, "decode-1 waits for a machine: no GPU is free")
        await ray_here.control.scale({ServiceRole.DECODE: 2, ServiceRole.PREFILL: 0})
        started = await journal.wait_for(name="decode-1", event="started")
        assert (started["gpus"], started["visible_gpus"]) == (1.0, journal.started["prefill-0"]["visible_gpus"])


async def test_explicit_shares_put_a_prefill_and_a_decode_worker_on_each_gpu(ray_here: Cluster, tmp_path: Path) -> None:
    """Ray sets aside the memory of the config, too, and knows the type."""
    memory: dict[str, Any] = {"prefill_memory_mb": 40, "decode_memory_mb": 24, "router_memory_mb": 7}
    config = replace(
        CONFIG, num_prefill=2, num_decode=2, prefill_gpus=0.25, decode_gpus=0.75, prefill_accelerator="H100", **memory
    )
    async with fleet(ray_here, tmp_path / "journal", config) as journal:
        await until(lambda: memory_set_aside_mb() == 2 * 40 + 2 * 24 + 7, "Ray sets memory aside")
        prefill = await gpus_of(journal, "prefill-0", "prefill-1")
        decode = await gpus_of(journal, "decode-0", "decode-1")
        assert sorted(prefill) == [(0.25, gpu) for gpu in ALL_GPUS]
        assert sorted(decode) == [(0.75, gpu) for gpu in ALL_GPUS]


def memory_set_aside_mb() -> float:
    import ray

    resources = [ray.cluster_resources(), ray.available_resources()]  # type: ignore[no-untyped-call]
    return float(resources[0]["memory"] - resources[1]["memory"]) / 2**20


async def test_a_fleet_that_needs_other_gpus_is_refused_before_anything_starts(
    ray_here: Cluster, tmp_path: Path
) -> None:
    spec = fake_fleet(tmp_path / "journal", replace(CONFIG, decode_accelerator="H300"))
    fresh = Cluster(head=ray_here._head)  # as `tandem serve` has it: no fleet has started
    with pytest.raises(ConfigError, match=r"'H300' is no accelerator type of Ray: it knows A100, .*H200"):
        async with serve_fleet(fresh, replace(spec, gpu_use=GpuUse.IF_PRESENT), print):
            pass
