"""Each test has its own memory fabric. `wire` drops, delays and changes its messages."""

from __future__ import annotations

import pytest

from cli import compose
from kv_transfer.transports.memory_transport import MemoryFabric
from tests.support.faults import Wire


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> MemoryFabric:
    """Joins every `transport = "memory"` of this test."""
    fabric = MemoryFabric()
    monkeypatch.setattr(compose, "FABRIC", fabric)
    return fabric


@pytest.fixture
def wire(fabric: MemoryFabric) -> Wire:
    return Wire(fabric)
