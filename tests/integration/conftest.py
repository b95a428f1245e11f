"""What integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ports import kept_port


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """Of a router's metrics page: Prometheus listens where it is told and nowhere else."""
    with kept_port("0.0.0.0") as port:
        yield port
