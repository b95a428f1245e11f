"""The router's end of a report stream: what is out of step is not used, and the stream starts again with a snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from core.errors import InvalidRequest
from protos import report_codec
from router.requests.events import WorkerJoined, WorkerLost, WorkerReported
from tandem_client.stubs import worker_pb2
from tests.unit.router.fake_reports import FakeWorker, Reports, load, snapshot


class Broken(Reports):
    """It breaks after the reports that the test has put in."""

    async def read(self) -> worker_pb2.WorkerReport:
        if not self._reports.empty():
            return await self._reports.get()
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "it is gone", None)


def report(number: int) -> worker_pb2.WorkerReport:
    return worker_pb2.WorkerReport(
        sequence_number=number,
        load=load(),
        block_changes=[number],
        block_runs=[1],
    )


@pytest.mark.parametrize(
    "numbers", [(0, 1, 3), (0, 1, 1), (0, 1, 0), (0, 1, 2**40)], ids=["lost", "doubled", "restarted", "far ahead"]
)
async def test_after_a_gap_nothing_is_used_before_the_next_snapshot(
    new_worker: FakeWorker, numbers: tuple[int, ...]
) -> None:
    first, *others = numbers
    assert first == 0
    out_of_step = Reports(snapshot("w"), *map(report, others))
    new_worker.is_followed(out_of_step, Reports(snapshot("w"), report(1)))
    events = [await new_worker.event() for _ in range(4)]
    assert [type(event) for event in events] == [WorkerJoined, WorkerReported, WorkerJoined, WorkerReported]
    assert events[1].changes.blocks == events[3].changes.blocks == (([1], True),)
    assert new_worker.num_watches == 2
    assert new_worker.posted.empty()


async def test_a_stream_whose_snapshot_is_missing_starts_again(new_worker: FakeWorker) -> None:
    new_worker.is_followed(Reports(report(1)), Reports(snapshot("w")))
    assert isinstance(await new_worker.event(), WorkerJoined)
    assert new_worker.num_watches == 2


async def test_a_worker_that_the_machine_has_given_up_joins_again_by_its_next_report(new_worker: FakeWorker) -> None:
    stream = Reports(snapshot("w"))
    new_worker.is_followed(stream, Reports(snapshot("w")))
    assert isinstance(await new_worker.event(), WorkerJoined)
    new_worker.known = False  # silent for too long
    stream.put(report(1))
    assert isinstance(await new_worker.event(), WorkerJoined)


async def test_a_worker_learns_the_pace_of_its_reports_when_it_joins_and_when_it_changes(
    new_worker: FakeWorker,
) -> None:
    first, second = Reports(), Reports(snapshot("w"))
    new_worker.is_followed(first, second)
    new_worker.link.pace_reports(70)
    while not new_worker.num_watches:
        await asyncio.sleep(0)
    new_worker.link.pace_reports(80)  # while the Watch call opens: the worker could not tell whose pace this is
    await asyncio.sleep(0)
    assert new_worker.intervals_ms == [70]
    first.put(snapshot("w"))
    await new_worker.event()
    for interval_ms in (80, 90, 90):
        new_worker.link.pace_reports(interval_ms)
        await asyncio.sleep(0)
    assert new_worker.intervals_ms == [70, 80, 90]
    first.put(report(7))  # a gap: the link subscribes again
    await new_worker.event()
    assert new_worker.intervals_ms == [70, 80, 90, 90]


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_a_worker_is_lost_when_the_second_call_fails_too(new_worker: FakeWorker, num_failures: int) -> None:
    """A worker that cuts off a slow router still serves the calls of the router."""
    new_worker.is_followed(*(Broken() for _ in range(num_failures)), Reports(snapshot("w")))
    event = await new_worker.event()
    if num_failures == 2:
        assert isinstance(event, WorkerLost)
        assert "it is gone" in event.detail
        event = await new_worker.event()
    assert isinstance(event, WorkerJoined)


async def test_a_router_that_is_cut_off_now_and_then_never_loses_the_worker(new_worker: FakeWorker) -> None:
    """Only failures without a report between them count."""
    broken = [Broken() for _ in range(4)]
    for stream in broken:
        stream.put(snapshot("w"))
    new_worker.is_followed(*broken, Reports(snapshot("w")))
    assert {type(await new_worker.event()) for _ in range(5)} == {WorkerJoined}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_cost": worker_pb2.StepCost(step_s=float("nan"))},
        {"step_cost": worker_pb2.StepCost(step_s=0.004, token_s=float("inf"))},
        {"step_cost": worker_pb2.StepCost(step_s=-0.004)},
        {"step_cost": None},
        {"prompt_backlog": [float("inf")]},
        {"step_cost": worker_pb2.StepCost(token_s=1.7e308)},  # a product with it is infinite
        {"step_limit_s": float("nan")},
        {"busy_seconds": -1.0},
    ],
)
def test_a_load_of_impossible_seconds_is_refused(wrong: dict[str, Any]) -> None:
    """The next request would end the router, and its restart, and every other router."""
    with pytest.raises(InvalidRequest) as refused:
        report_codec.decode_load(load(**wrong))
    assert refused.value.field == f"load.{next(iter(wrong))}"


def test_of_paths_those_of_a_later_version_are_left_out_and_impossible_speeds_are_refused() -> None:
    fine = worker_pb2.PathReport(peer="p", state=worker_pb2.PATH_STATE_FINE)
    later = worker_pb2.PathReport(peer="q", state=99)  # type: ignore[arg-type]
    (path,) = report_codec.decode_changes(worker_pb2.WorkerReport(paths=[fine, later])).paths
    assert path.peer == "p"
    fine.latency_ms = float("nan")
    with pytest.raises(InvalidRequest, match="paths: "):
        report_codec.decode_changes(worker_pb2.WorkerReport(paths=[fine]))
