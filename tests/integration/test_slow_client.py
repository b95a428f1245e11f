"""A client that does not read and gave no deadline: its call ends at the router's own, and everything is freed."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from router.inference_servicer import InferenceServicer
from tests.support.deployment import deploy, make_request, tiny_config

TIMEOUT_S = 1.0
PATIENCE_S = 20.0


async def test_a_client_that_never_reads_is_let_go_at_the_default_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    generate = InferenceServicer.Generate

    async def watched(self: InferenceServicer, request: object, context: object) -> None:
        try:
            await generate(self, request, context)  # type: ignore[arg-type]
        finally:
            ended.set()

    monkeypatch.setattr(InferenceServicer, "Generate", watched)
    async with deploy(tiny_config(default_timeout_s=TIMEOUT_S, max_in_flight_per_worker=32)) as deployment:
        # 16 choices of 500 tokens with 20 log-probabilities each: some megabytes, more than the connection holds.
        call = deployment.inference.Generate(make_request(text="speak on", max_tokens=500, n=16, logprobs=20))
        assert await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        shell = deployment.router._shell
        assert shell is not None
        assert shell.num_open == 0
        assert shell.machine.num_in_flight == shell.machine.num_queued == 0
        await deployment.settle()
        with pytest.raises(grpc.aio.AioRpcError, match="the client did not read"):
            await _read_to_the_end(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def _read_to_the_end(call: grpc.aio.UnaryStreamCall) -> None:  # type: ignore[type-arg]
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass
