"""vLLM keeps the contract of an engine, as the fake does in tests/unit/vllm_worker/test_fake_engine.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.diagnosis.vllm_environment import default_model_dir
from tests.support.engine_contract import EngineContract, EnginePair, WatchedEngine, a_request
from tests.support.engine_relay import RemoteEngine
from tests.support.lora import write_adapters
from tests.support.service_process import Tables
from tests.support.vllm_fleet import VllmProcess, require_vllm, started_workers
from vllm_worker.fake_engine import ADAPTERS


@dataclass(frozen=True)
class Engines:
    processes: dict[str, VllmProcess]
    compiler_cache: Path
    compiled_at_start: frozenset[Path]


def compiled_in(compiler_cache: Path) -> frozenset[Path]:
    return frozenset(compiler_cache.rglob("*.so"))


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
    """They find nothing compiled: elsewhere an earlier run may have left what they need."""
    require_vllm()
    directory, cache = tmp_path_factory.mktemp("vllm"), tmp_path_factory.mktemp("compiled")
    changes: Tables = {"vllm": {"adapters": write_adapters(directory, default_model_dir(), ADAPTERS)}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        places = ("prefill", 0), ("decode", 0)
        with started_workers(directory, *places, engines_alone=True, changes=changes) as started:
            yield Engines(started, cache, compiled_in(cache))


class TestVllm(EngineContract):
    most_late_reports = 8  # between two processes

    @pytest.fixture
    async def pair(self, engines: Engines) -> AsyncIterator[EnginePair]:
        prefill, decode = engines.processes["prefill-0"], engines.processes["decode-0"]
        async with watched(prefill) as owner, watched(decode) as reader:
            yield EnginePair(owner, reader, lambda: decode.engine().kill())

    async def test_no_request_waits_for_a_compiler(self, engines: Engines) -> None:
        """Neither those of the contract, which came before, nor the first log probabilities of an engine."""
        assert engines.compiled_at_start
        async with watched(engines.processes["prefill-0"]) as engine:
            requests = [a_request(number, 20, num_logprobs=0) for number in (1, 2)]
            await asyncio.gather(*(engine.complete(request) for request in requests))
        assert compiled_in(engines.compiler_cache) == engines.compiled_at_start
