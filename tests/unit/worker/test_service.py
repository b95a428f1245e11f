"""A worker whose reports end must end, too."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cli.compose import build_decode_worker
from tests.support.deployment import place, tiny_config
from worker.service import WorkerService


async def test_a_report_that_fails_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routers take it for lost, and it would compute for nobody for ever."""

    def fail(_: WorkerService) -> None:
        raise ValueError("a load that cannot be encoded")

    monkeypatch.setattr(WorkerService, "_changes", fail)
    config = tiny_config()
    config = replace(config, worker=replace(config.worker, idle_report_interval_s=0.05))
    worker = build_decode_worker(config, place(0))
    try:
        await worker.start()
        async with asyncio.timeout(10):
            error = await worker.failed()
        assert str(error) == "a load that cannot be encoded"
    finally:
        await worker.stop()
