"""The fake engine keeps the contract of an engine, as real vLLM does in tests/vllm/test_engine.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.engine_contract import EngineContract, EnginePair, WatchedEngine, a_request
from vllm_worker.fake_engine import FakeCluster, FakeEngine


async def started(cluster: FakeCluster, name: str) -> WatchedEngine:
    watched = WatchedEngine(engine := FakeEngine(cluster, name=name))
    watched.info = await engine.start(watched.report)
    return watched


class TestFakeEngine(EngineContract):
    @pytest.fixture
    async def pair(self) -> AsyncIterator[EnginePair]:
        cluster = FakeCluster()
        owner, reader = await started(cluster, "owner"), await started(cluster, "reader")
        fake = reader.engine
        assert isinstance(fake, FakeEngine)
        yield EnginePair(owner, reader, fake.die)
        for watched in (owner, reader):
            assert isinstance(watched.engine, FakeEngine)
            await watched.engine.close()
        assert not cluster.kept

    async def test_kept_kv_that_nobody_reads_ends_with_its_lease(self, pair: EnginePair) -> None:
        assert isinstance(pair.owner.engine, FakeEngine)
        pair.owner.engine.lease_s = 1.0
        await super().test_kept_kv_that_nobody_reads_ends_with_its_lease(pair)

    async def test_kept_kv_ends_with_its_owner(self, pair: EnginePair) -> None:
        _, handoff = await pair.owner.offer(request := a_request(1000, 20))
        owner = pair.owner.engine
        assert isinstance(owner, FakeEngine)
        owner.die()
        failed = await pair.reader.ended(pair.reader.submit(request, handoff=handoff))
        assert failed.error
