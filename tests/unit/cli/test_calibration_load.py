"""A calibration sends requests without drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from cli.commands.calibration_load import CalibrationLoad, LoadPlan
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2


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
