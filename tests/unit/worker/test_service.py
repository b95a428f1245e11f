"""A worker whose reports end must end, too. An idle worker changes its role."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from cli.compose import build_decode_worker
from core.errors import WorkerDrains
from core.lifecycle import ServiceRole
from decode_worker.servicer import DecodeServicer
from prefill_worker.machine import PrefillMachine
from tandem_client.stubs import worker_pb2
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


async def test_an_idle_worker_changes_its_role_and_keeps_its_name_its_agent_and_its_pool() -> None:
    worker = build_decode_worker(tiny_config(), place(1))
    try:
        endpoint = await worker.start()
        before, parts = worker._snapshot(), worker._parts
        await worker.switch_role(ServiceRole.PREFILL, 5.0)
        after = worker._snapshot()
        assert parts is not None
        assert isinstance(worker._parts.machine, PrefillMachine)
        assert worker._parts.machine.core is parts.machine.core
        assert after.snapshot.role == worker_pb2.WORKER_ROLE_PREFILL
        assert after.snapshot.worker_id == before.snapshot.worker_id == endpoint.service_id
        assert after.snapshot.agent == before.snapshot.agent
        assert (before.load.takes_moves, after.load.takes_moves) == (True, False)
        assert after.load.state == worker_pb2.WORKER_STATE_SERVING
        decode = worker._servicers[ServiceRole.DECODE]
        assert isinstance(decode, DecodeServicer)
        with pytest.raises(WorkerDrains, match="serves as prefill worker"):
            decode._driver.refuse_if_stopped()
    finally:
        await worker.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]
