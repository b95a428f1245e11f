"""A worker ends with its reports, its device, three failed steps in a row or a step that hangs. An idle worker changes
its role."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from unittest.mock import Mock, call, patch

import pytest

from cli.compose import build_decode_worker
from core.config import WorkerConfig
from core.errors import DeviceLost, OutOfDeviceMemory, WorkerDrains
from core.lifecycle import ServiceRole
from core.step import StepOutput
from decode_worker.servicer import DecodeServicer
from prefill_worker.machine import PrefillMachine
from tandem_client.stubs import worker_pb2
from tests.support.deployment import place, tiny_config
from worker.service import MAX_FAILED_STEPS, WorkerService


async def test_a_report_that_fails_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routers take it for lost, and it would compute for nobody for ever."""

    def fail(_: WorkerService) -> None:
        raise ValueError("a load that cannot be encoded")

    monkeypatch.setattr(WorkerService, "_changes", fail)
    worker = build_decode_worker(replace(tiny_config(), worker=WorkerConfig(idle_report_interval_s=0.05)), place(0))
    try:
        await worker.start()
        async with asyncio.timeout(10):
            error = await worker.failed()
        assert str(error) == "a load that cannot be encoded"
    finally:
        await worker.stop()


BUG, DONE, FULL = RuntimeError("a kernel has a bug"), StepOutput(0, {}), OutOfDeviceMemory("no memory")


@pytest.mark.parametrize(
    ("results", "ends"),
    [
        ([BUG] * (MAX_FAILED_STEPS - 1), False),
        ([BUG] * MAX_FAILED_STEPS, True),
        ([BUG, BUG, DONE] * MAX_FAILED_STEPS, False),
        ([FULL] * MAX_FAILED_STEPS, False),
        ([DeviceLost("gone")], True),
    ],
)
def test_steps_that_fail_in_a_row_for_an_unknown_reason_and_a_lost_device_end_the_worker(
    results: list[StepOutput | Exception], ends: bool
) -> None:
    """One failed step may be the fault of its request."""
    worker = build_decode_worker(tiny_config(), place(0))
    post, fail = Mock(), Mock()
    with patch.multiple(worker, _post_threadsafe=post, _fail_threadsafe=fail):
        for result in results:
            worker._on_step_done(result)
    assert (fail.call_args_list == [call(results[-1])]) is ends
    assert post.call_count == len(results) - ends


@pytest.mark.parametrize(
    ("started_at", "hangs", "is_watched"), [(None, False, False), (6.0, False, True), (5.0, True, False)]
)
def test_a_step_hangs_by_its_own_time_alone(started_at: float | None, hangs: bool, is_watched: bool) -> None:
    worker = build_decode_worker(replace(tiny_config(), worker=WorkerConfig(step_timeout_s=5.0)), place(0))
    loop, fatal = Mock(time=lambda: 10.0), Mock()
    with patch.multiple(worker, _loop=loop, _on_fatal=fatal, _view=Mock(step_started_at=started_at), create=True):
        worker._check_step()
    assert (fatal.called, loop.call_at.called) == (hangs, is_watched)


async def test_an_idle_worker_changes_its_role_and_keeps_its_name_its_agent_and_its_pool() -> None:
    others = transfer_threads()  # of tests before this one
    worker = build_decode_worker(tiny_config(), place(1))
    try:
        endpoint = await worker.start()
        before, parts = worker._snapshot(), worker._parts
        assert parts is not None
        parts.agent.num_malformed = 3
        await worker.switch_role(ServiceRole.PREFILL, 5.0)
        after = worker._snapshot()
        assert isinstance(worker._parts.machine, PrefillMachine)
        assert worker._parts.machine.core is parts.machine.core
        assert after.snapshot.role == worker_pb2.WORKER_ROLE_PREFILL
        assert after.snapshot.worker_id == before.snapshot.worker_id == endpoint.service_id
        assert after.snapshot.agent == before.snapshot.agent
        assert (before.load.takes_moves, after.load.takes_moves) == (True, False)
        assert before.load.gives_prefixes
        assert after.load.gives_prefixes
        assert after.load.state == worker_pb2.WORKER_STATE_SERVING
        assert after.load.num_malformed_messages == 3
        decode = worker._servicers[ServiceRole.DECODE]
        assert isinstance(decode, DecodeServicer)
        with pytest.raises(WorkerDrains, match="serves as prefill worker"):
            decode._driver.refuse_if_stopped()
    finally:
        await worker.stop()
    assert not transfer_threads() - others


def transfer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("transfer-")}
