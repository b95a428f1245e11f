"""Fixtures of the tests of the router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.unit.router.fake_reports import FakeWorker


@pytest_asyncio.fixture
async def new_worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeWorker]:
    """A worker whose router waits for no retry. The test calls `is_followed`."""
    monkeypatch.setattr("router.links.worker_link.RETRY_S", (0.0,))
    worker = FakeWorker()
    yield worker
    await worker.link.close()


@pytest_asyncio.fixture
async def worker(new_worker: FakeWorker) -> FakeWorker:
    """A worker that a router follows."""
    new_worker.is_followed()
    return new_worker
