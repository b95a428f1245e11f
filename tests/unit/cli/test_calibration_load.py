"""A calibration sends requests without drafts, and takes the speed of a link from what its workers measure or count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from cli.commands.calibrate import workers_of
from cli.commands.calibration_load import CalibrationLoad, LoadPlan
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2, worker_pb2
from tandem_client.stubs.cluster_pb2 import GetFleetResponse


class Recorder:
    """Answers each request with all its tokens at once."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def generate(
        self, request: inference_pb2.GenerateRequest, _timeout_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        tokens = inference_pb2.TokenChunk(token_ids=[1] * request.stop.max_tokens)
        yield inference_pb2.GenerateResponse(tokens=tokens)


async def test_no_request_of_a_calibration_takes_drafts() -> None:
    """The costs and the simulator have one token a step: with drafts of 3.5 tokens, TPOT was off by 243 %."""
    plan = LoadPlan(longest_prompt=32, output_tokens=4, largest_batch=2, num_checked=3, seed=0, timeout_s=1.0)
    recorder = Recorder()
    load = CalibrationLoad(cast("AsyncClient", recorder), plan, vocab_size=100)
    await load.fit(1, 1)
    await load.check(rate=1e6)
    assert len(recorder.requests) == 2 * (2 + 1 + 2) + 3
    assert all(request.HasField("speculation") and not request.speculation for request in recorder.requests)


def test_a_worker_without_measured_paths_has_the_speed_of_what_it_has_read() -> None:
    fleet = GetFleetResponse()
    for load in (
        worker_pb2.LoadReport(transferred_bytes=6_000, transfer_seconds=2.0),
        worker_pb2.LoadReport(transferred_bytes=6_000, transfer_seconds=2.0, paths=[{"bytes_per_s": 7.0}]),
        worker_pb2.LoadReport(),
    ):
        fleet.workers.add(state=worker_pb2.WORKER_STATE_SERVING).load.CopyFrom(load)
    assert [[path.bytes_per_s for path in worker.paths] for worker in workers_of(fleet)] == [[3_000.0], [7.0], []]
