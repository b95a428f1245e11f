"""A router that reads its tokens slowly, or stands still, costs itself and nobody else.

The worker keeps a bounded number of tokens for the router, then ends the token stream and its calls. The other router
does not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.lifecycle import ServiceRole
from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from decode_worker import token_stream
from decode_worker.servicer import DecodeServicer
from protos import codec
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from tests.support.deployment import Answer, Deployment, deploy, make_request, trailers_of
from tests.support.faults import Stream, expected, fault_config, prompt_of, serves_on
from tests.support.processes import Fleet
from tests.support.steps import slow_down
from tests.support.waiting import until

# A token with 20 log-probabilities takes some 200 bytes, so the smallest window of HTTP/2 is soon full.
NUM_LOGPROBS = 20
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
STREAM_ID = 77
BUSY_MACHINE_S = 2.0  # a write to a router that reads may take this long on a machine with more work than cores


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(fault_config()) as deployment:
        slow_down(deployment.decode[0], 0.01)
        yield deployment


def servicer_of(deployment: Deployment) -> DecodeServicer:
    servicer = deployment.decode[0]._servicers[ServiceRole.DECODE]
    assert isinstance(servicer, DecodeServicer)
    return servicer


def decode_request(number: int, stream_id: int = STREAM_ID) -> worker_pb2.DecodeRequest:
    """A call that the worker computes alone and that outlives the test."""
    sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True, num_logprobs=NUM_LOGPROBS)
    request = Request(f"slow#{number}", (number,) * 8, 8, sampling)
    return worker_pb2.DecodeRequest(
        sequence=codec.encode_sequence(request, CallId("router", number)), stream_id=stream_id
    )


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(20):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
    return failed.value


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_a_router_that_never_reads_loses_its_calls_and_no_other_router_does(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "MAX_WRITE_S", BUSY_MACHINE_S)
    bystander = await Stream(deployment.inference, prompt_of(1), 800, timeout_s=60.0).reach(3)
    address = deployment.endpoints[id(deployment.decode[0])].address
    async with grpc.aio.insecure_channel(address, SMALL_WINDOW) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
        tokens = stub.StreamTokens(worker_pb2.StreamTokensRequest(router_id="slow", stream_id=STREAM_ID))
        assert not (await tokens.read()).calls
        calls = [stub.Decode(decode_request(number)) for number in range(1, 9)]
        for error in [await error_of(call) for call in calls]:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "token stream" in (error.details() or "")
            assert trailers_of(error)["tandem-retryable"] == "true"
        assert list(servicer_of(deployment)._streams) != [STREAM_ID]
        assert "no token stream" in str((await error_of(stub.Decode(decode_request(9)))).details())
        with pytest.raises(grpc.aio.AioRpcError, match="the router slow reads its tokens too slowly"):
            await read_to_the_end(tokens)
    assert not bystander.ended
    await bystander.right()
    assert bystander.finished.attempts == 1
    await deployment.settle()


async def test_a_router_whose_connection_ends_takes_its_calls_with_it(deployment: Deployment) -> None:
    """The Decode calls of another connection end with the token stream that they name."""
    address = deployment.endpoints[id(deployment.decode[0])].address
    async with grpc.aio.insecure_channel(address) as other:
        decode = worker_pb2_grpc.DecodeWorkerStub(other).Decode  # type: ignore[no-untyped-call]
        async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
            tokens = stub.StreamTokens(worker_pb2.StreamTokensRequest(router_id="short", stream_id=STREAM_ID))
            assert not (await tokens.read()).calls
            call = decode(decode_request(1))
            assert (await tokens.read()).calls
        assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
    await deployment.settle()
    await serves_on(deployment.inference)


async def generate(fleet: Fleet, seed: int, num_tokens: int) -> Answer:
    """Through the router of the fleet, with log-probabilities."""
    request = make_request(token_ids=prompt_of(seed), max_tokens=num_tokens, logprobs=NUM_LOGPROBS)
    answer = Answer()
    async for response in fleet.inference.Generate(request, timeout=90.0):
        answer.take(response)
    return answer


async def test_a_router_that_stands_still_is_cut_off_and_continues_its_requests_when_it_runs_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "MAX_WRITE_S", BUSY_MACHINE_S)
    servicer = servicer_of(deployment)
    config = replace(deployment.config, router=replace(deployment.config.router, port=0))
    async with Fleet.start(config, {}, others=list(deployment.endpoints.values())) as fleet:
        await until(lambda: len(servicer._streams) == 2, "each router has a token stream")
        own, frozen = servicer._streams
        bystander = await Stream(deployment.inference, prompt_of(1), 800, timeout_s=60.0).reach(3)
        victims = [asyncio.create_task(generate(fleet, seed, 600)) for seed in range(20, 28)]
        await until(lambda: len(servicer._calls) == 9, "all requests decode")
        async with fleet.stopped("router-0"):
            await until(lambda: list(servicer._streams) == [own], "the stopped router is cut off", seconds=20.0)
            left = [servicer._streams[own].router_id]
            await until(
                lambda: [call.stream.router_id for call in servicer._calls.values()] == left, "its calls have ended"
            )
            num_tokens = bystander.num_tokens
            await bystander.reach(num_tokens + 20)
        answers = await asyncio.gather(*victims)
        assert len(servicer._streams) == 2
        assert frozen not in servicer._streams, "the router opens a stream with another id"
        for seed, answer in zip(range(20, 28), answers, strict=True):
            assert answer.token_ids == expected(prompt_of(seed), 600)
            assert answer.finished.attempts > 1
        await bystander.right()
        assert bystander.finished.attempts == 1
    await deployment.settle()
