"""Each test has its own memory fabric."""

from __future__ import annotations

import pytest

from cli import compose
from kv_transfer.transports.memory_transport import MemoryFabric


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> MemoryFabric:
    """Joins every `transport = "memory"` of this test."""
    fabric = MemoryFabric()
    monkeypatch.setattr(compose, "FABRIC", fabric)
    return fabric
