"""A router without workers: it answers every Generate call with the texts and calls of tools that a test gives it.

async with scripted_router(["Hello ", "world"]) as router:
    ... calls to router.address ...
    assert router.requests[0].chat.messages[0].content == "..."
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from core.errors import TandemError
from runtime.rpc.grpc_server import abort
from tandem_client.stubs import inference_pb2, inference_pb2_grpc

# An error of a router, or a status with its trailers.
Failure = TandemError | tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
LOST: Failure = (grpc.StatusCode.UNAVAILABLE, "Socket closed", ())  # as gRPC itself: no trailers


async def fail(context: Any, failures: list[Failure]) -> None:
    """End the call by the first of `failures`, if there is one."""
    if not failures:
        return
    failure = failures.pop(0)
    if isinstance(failure, TandemError):
        await abort(context, failure)
    await context.abort(*failure)


@dataclass
class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    texts: list[str]  # each is a chunk
    tool_calls: list[inference_pb2.ToolCallDelta] = field(default_factory=list)  # each is a chunk, behind the texts
    address: str = ""
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)  # of each Generate call
    failures: list[Failure] = field(default_factory=list)  # each ends one call before its texts
    late_failures: list[Failure] = field(default_factory=list)  # each ends one call after its texts
    num_chunks: int = 0  # written
    num_cancelled: int = 0
    hold: asyncio.Event | None = None  # if set, calls wait for it after the texts

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        await fail(context, self.failures)
        try:
            chunks = [inference_pb2.TokenChunk(text=text) for text in self.texts]
            chunks += [inference_pb2.TokenChunk(tool_calls=[delta]) for delta in self.tool_calls]
            for index, chunk in enumerate(chunks):
                for choice in range(request.n or 1):
                    chunk.choice, chunk.index, chunk.token_ids[:] = choice, index, [1]
                    yield inference_pb2.GenerateResponse(tokens=chunk)
                    self.num_chunks += 1
            if self.hold is not None:
                await self.hold.wait()
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit if the call ends during a write
            self.num_cancelled += 1
            raise
        await fail(context, self.late_failures)
        for choice in range(request.n or 1):
            usage = inference_pb2.Usage(prompt_tokens=7, completion_tokens=len(self.texts), cached_tokens=3)
            promise = inference_pb2.Promise(ttft_ms=12.5, tpot_ms=3.0, path=inference_pb2.REQUEST_PATH_DISAGGREGATED)
            receipt = inference_pb2.Receipt(queue_ms=1.0, prefill_ms=2.0, decode_ms=4.0, kv_block_seconds=0.5)
            finished = inference_pb2.Finished(
                choice=choice,
                finish_reason=inference_pb2.FINISH_REASON_STOP,
                usage=usage,
                promise=promise,
                receipt=receipt,
                attempts=1,
                path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
                num_tool_calls=sum(bool(delta.id) for delta in self.tool_calls),
            )
            yield inference_pb2.GenerateResponse(finished=finished)

    async def Detokenize(self, _: Any, __: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse()

    async def GetModel(self, _: Any, context: Any) -> inference_pb2.GetModelResponse:
        await fail(context, self.failures)
        return inference_pb2.GetModelResponse(
            name="scripted", vocab_size=1000, context_length=4096, eos_token_ids=[2], has_chat_template=True,
            tool_format="hermes", can_decode=True,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def scripted_router(texts: list[str], router: ScriptedRouter | None = None) -> AsyncIterator[ScriptedRouter]:
    """`router`: another one than a `ScriptedRouter` with these texts."""
    router = router or ScriptedRouter(texts)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port(router.address or '127.0.0.1:0')}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(grace=None)
