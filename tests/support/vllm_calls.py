"""Calls of `vllm.grpc.engine` on the workers of a deployment, as another project's router makes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from core.config import TandemConfig
from runtime.rpc.grpc_server import open_channel
from tests.support.deployment import Deployment
from worker.service import WorkerService

REMOTE_DECODE = '{"do_remote_decode":true,"do_remote_prefill":false}'


def with_vllm_engine(config: TandemConfig, mode: str = "open") -> TandemConfig:
    return replace(config, worker=replace(config.worker, vllm_engine=mode))


def generate_request(token_ids: Sequence[int], **fields: Any) -> vllm_engine_pb2.GenerateRequest:
    """A greedy request that ignores the end of sequence. `sampling` changes its parameters."""
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | fields.pop("sampling", {})
    return vllm_engine_pb2.GenerateRequest(
        request_id=fields.pop("request_id", "r"),
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=token_ids),
        sampling_params=vllm_engine_pb2.SamplingParams(**sampling),
        **fields,
    )


@contextlib.asynccontextmanager
async def engine_of(deployment: Deployment, worker: WorkerService) -> AsyncIterator[Any]:
    """The stub of one worker."""
    address = deployment.endpoints[id(worker)].address
    async with open_channel(address, 64 << 20) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def complete(
    engine: Any, request: vllm_engine_pb2.GenerateRequest, timeout_s: float | None = 30.0
) -> list[vllm_engine_pb2.GenerateComplete]:
    """The last message of each choice, by index."""
    ends = [r.complete async for r in engine.Generate(request, timeout=timeout_s) if r.HasField("complete")]
    return sorted(ends, key=lambda end: end.index)
