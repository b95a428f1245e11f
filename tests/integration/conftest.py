"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from core.config import EngineConfig
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.ports import kept_port
from tests.support.reference import CoLocatedEngine

MODELS = ["fake:tiny", "random:llama-tiny"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[CoLocatedEngine]:
    engine = CoLocatedEngine(EngineConfig(model=model, dtype="float32", kv_memory_mb=32, num_threads=1))
    yield engine
    engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Deployment]:
    """Two pools of a tiny model, where a file has no deployment of its own."""
    async with deploy(tiny_config()) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(running: Deployment) -> AsyncIterator[Deployment]:
    """The `running` deployment of the file, idle and with empty caches for every test."""
    yield running
    await running.settle()
    running.drop_caches(running.workers)


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """Of a router's metrics page: Prometheus listens where it is told and nowhere else."""
    with kept_port("0.0.0.0") as port:
        yield port
