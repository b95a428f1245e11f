"""Workers check what a router with the token of the cluster sends them: routers may be faulty.

tests/unit/core/test_request_limits.py has every field."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.request import Request, SamplingParams
from model_files.builtin_configs import BYTE_VOCAB_SIZE
from protos import codec
from runtime.rpc.grpc_server import FIELD_KEY, open_channel
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from tests.support.deployment import Deployment, deploy, tiny_config, trailers_of, transfers

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (1, 2, 3)
LIMIT = rf"token id {BYTE_VOCAB_SIZE} is outside the vocabulary \[0, {BYTE_VOCAB_SIZE}\)"
ODD = {
    "token_ids": (Request("odd", (BYTE_VOCAB_SIZE,), 1, SamplingParams(max_tokens=4)), LIMIT),
    "max_tokens": (Request("odd", PROMPT, 3, SamplingParams(max_tokens=4096)), "over the context of 2048 tokens"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config("random:smollm2-tiny")) as deployment:
        yield deployment


async def prefill(deployment: Deployment, wire: worker_pb2.SequenceRequest) -> None:
    reader = codec.encode_agent(transfers(deployment.decode[0]).address)
    async with open_channel(deployment.endpoints[id(deployment.prefill[0])].address, 1 << 20) as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)  # type: ignore[no-untyped-call]
        await stub.Prefill(worker_pb2.PrefillRequest(sequence=wire, transfer_id=bytes(16), reader=reader), timeout=10)


async def decode(deployment: Deployment, wire: worker_pb2.SequenceRequest) -> None:
    async with open_channel(deployment.endpoints[id(deployment.decode[0])].address, 1 << 20) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.StreamTokens(worker_pb2.StreamTokensRequest(stream_id=1), timeout=10)
        await stream.read()
        await stub.Decode(worker_pb2.DecodeRequest(sequence=wire, stream_id=1), timeout=10)


@pytest.mark.parametrize("call", [prefill, decode])
@pytest.mark.parametrize("field", ODD)
async def test_a_worker_refuses_what_its_model_cannot_compute(field: str, call: object, deployment: Deployment) -> None:
    odd, message = ODD[field]
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await call(deployment, codec.encode_sequence(odd))  # type: ignore[operator]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailers_of(caught.value)[FIELD_KEY] == field
    assert (await deployment.generate(token_ids=PROMPT, max_tokens=4)).finished.attempts == 1
