"""A client that does not read and gave no deadline: its call ends at the router's own, and everything is freed."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from router.serving.inference_servicer import InferenceServicer
from tandem_client.stubs import inference_pb2_grpc
from tests.support.deployment import deploy, make_request, tiny_config

TIMEOUT_S = 3.0
PATIENCE_S = 20.0


async def test_a_client_that_never_reads_is_let_go_at_the_default_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()
    generate = InferenceServicer.Generate

    async def watched(self: InferenceServicer, request: object, context: object) -> None:
        try:
            await generate(self, request, context)  # type: ignore[arg-type]
        finally:
            ended.set()

    monkeypatch.setattr(InferenceServicer, "Generate", watched)
    async with contextlib.AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(deploy(tiny_config(default_timeout_s=TIMEOUT_S)))
        # 16 choices of 500 tokens with 20 log-probabilities each are megabytes; this client's window is 64 KiB.
        window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(deployment.router_address, window))
        inference = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(make_request(text="speak on", max_tokens=500, n=16, logprobs=20))
        assert await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        shell = deployment.router._shell
        assert caplog.text == ""
        assert shell.num_open == 0
        assert shell.view.num_in_flight == shell.view.num_queued == 0
        await deployment.settle()
        with pytest.raises(grpc.aio.AioRpcError, match="the client did not read"):
            await _read_to_the_end(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def _read_to_the_end(call: grpc.aio.UnaryStreamCall) -> None:  # type: ignore[type-arg]
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass
