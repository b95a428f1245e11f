"""Clients that do not read: a stop string ends the output at the worker, and a call without a deadline ends at the
router's own. Everything is freed."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from router.serving.inference_servicer import InferenceServicer
from runtime.rpc.grpc_server import RETRY_AFTER_KEY
from tandem_client.stubs import inference_pb2_grpc
from tests.support.deployment import Deployment, deploy, make_request, tiny_config
from tests.support.faults import Stream, fault_config, prompt_of
from tests.support.live_objects import count_live, growth
from tests.support.steps import slow_down
from tests.support.waiting import until

PROMPT = prompt_of(1)
NUM_TOKENS = 200
# With 20 log-probabilities for each token, 16 choices fill this window with less than their tokens.
WINDOW_BYTES = 64 * 1024
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
PATIENCE_S = 20.0


async def stop_string_of(deployment: Deployment) -> str:
    """A string that first appears far into the text. Messages may join any number of its tokens."""
    plain = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS)
    text = plain.text
    for start in range(len(text) * 5 // 8, len(text) - 8):
        stop = text[start : start + 4]
        if text.count(stop) == 1 and "\ufffd" not in stop:
            return stop
    raise AssertionError("the text has no such string")


async def test_a_stop_string_ends_the_output_at_the_worker_although_the_client_does_not_read() -> None:
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], 0.002)
        stop = await stop_string_of(deployment)
        shell = deployment.router._shell
        async with grpc.aio.insecure_channel(deployment.router_address, SMALL_WINDOW) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            request = make_request(token_ids=PROMPT, max_tokens=4000, stop_strings=[stop], logprobs=20, n=16)
            call = inference.Generate(request, timeout=60.0)
            await call.read()
            await until(lambda: not shell.view.num_in_flight, "the stop string has ended every choice", PATIENCE_S)
            num_bytes, ends = 0, []
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                num_bytes += response.ByteSize()
                if response.HasField("finished"):
                    ends.append(response.finished)
    assert num_bytes > 2 * WINDOW_BYTES, "the router could not write all of it before the client read"
    assert [end.stop_match for end in ends] == [stop] * 16
    assert all(end.usage.completion_tokens < NUM_TOKENS for end in ends)


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
    async with (
        deploy(tiny_config(default_timeout_s=3.0)) as deployment,
        grpc.aio.insecure_channel(deployment.router_address, SMALL_WINDOW) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
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


# ---- A thousand calls at once: each ends with its tokens or with a hint when to come back, and nothing stays behind.

NUM_CALLS = 1000
NUM_PROMPTS = 20
NUM_OUTPUT = 3
STEP_S = 0.05  # so slow that calls come faster than they are served
WITHIN_S = 150.0  # a machine with 24 busy processes beside this one took 29 s


def calls(deployment: Deployment, count: int) -> list[Stream]:
    prompts = [prompt_of(seed, 20 + seed) for seed in range(NUM_PROMPTS)]
    return [
        Stream(deployment.inference, prompts[number % NUM_PROMPTS], NUM_OUTPUT, timeout_s=WITHIN_S)
        for number in range(count)
    ]


async def test_of_a_thousand_calls_each_ends_with_tokens_or_a_retry_hint_and_leaves_nothing_behind() -> None:
    # A first read of a prefix from a peer connects two workers, which stay connected.
    config = fault_config(lease_s=1.0, max_queued=40, max_in_flight_per_worker=2, peer_prefixes="never")
    async with deploy(config, num_prefill=2, num_decode=2) as deployment:
        for stream in calls(deployment, NUM_PROMPTS):
            await stream.right()
        await deployment.settle()
        before = count_live()

        for worker in deployment.workers:
            slow_down(worker, STEP_S)
        streams = calls(deployment, NUM_CALLS)
        for stream in streams:
            await stream.end()
        refused = [stream for stream in streams if stream.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
        served = [stream for stream in streams if stream.code is None]
        others = {(stream.code, stream.details) for stream in {*streams} - {*refused, *served}}
        assert not others
        assert len(refused) > 100
        assert len(served) > 40, "no more than the queue holds"
        for stream in served:
            await stream.right()
        for stream in refused:
            assert stream.num_tokens == 0
            assert int(stream.trailers[RETRY_AFTER_KEY]) > 0

        hint_s = max(int(stream.trailers[RETRY_AFTER_KEY]) for stream in refused) / 1000
        await asyncio.sleep(hint_s)
        await calls(deployment, 1)[0].right()
        await deployment.settle()
        del stream, streams, refused, served
        assert not growth(before, count_live())
