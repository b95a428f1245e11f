"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.config import EngineConfig
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


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """Of a router's metrics page: Prometheus listens where it is told and nowhere else."""
    with kept_port("0.0.0.0") as port:
        yield port
