"""vLLM keeps the contract of an engine, as the fake does in tests/unit/vllm_worker/test_fake_engine.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from cli.diagnosis.vllm_environment import default_model_dir
from tests.support.engine_contract import EngineContract, EnginePair, WatchedEngine
from tests.support.engine_relay import RemoteEngine
from tests.support.lora import write_adapters
from tests.support.vllm_fleet import VllmProcess, require_vllm, started_workers
from vllm_worker.fake_engine import ADAPTERS

Engines = dict[str, VllmProcess]


@contextlib.asynccontextmanager
async def watched(process: VllmProcess) -> AsyncIterator[WatchedEngine]:
    engine = RemoteEngine()
    await engine.connect(process.endpoint.address)
    watched = WatchedEngine(engine)
    watched.info = engine.info

    async def watch() -> None:
        async for report in engine.reports():
            watched.report(report)

    watching = asyncio.create_task(watch())
    try:
        yield watched
    finally:
        engine.close()
        await watching


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    require_vllm()
    directory = tmp_path_factory.mktemp("vllm")
    adapters = write_adapters(directory, default_model_dir(), ADAPTERS)
    places = ("prefill", 0), ("decode", 0)
    with started_workers(directory, *places, engines_alone=True, changes={"vllm": {"adapters": adapters}}) as started:
        yield started


class TestVllm(EngineContract):
    most_late_reports = 8  # between two processes

    @pytest.fixture
    async def pair(self, engines: Engines) -> AsyncIterator[EnginePair]:
        async with watched(engines["prefill-0"]) as owner, watched(engines["decode-0"]) as reader:
            yield EnginePair(owner, reader, lambda: engines["decode-0"].engine().kill())
