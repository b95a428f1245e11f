"""GenerateMany for a router of a test that has Generate only: each call of the stream is a Generate call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import grpc

from protos import inference_pb2

Trailers = tuple[tuple[str, str], ...]


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, message: str, trailers: Trailers) -> None:
        self.code, self.message, self.trailers = code, message, trailers


class CallContext:
    """The context of one call in a shared stream."""

    def __init__(self, stream: Any, start: inference_pb2.StartCall, writing: asyncio.Lock) -> None:
        self._stream, self._start, self._writing = stream, start, writing

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self._start.metadata.items())

    def time_remaining(self) -> float:
        return self._start.timeout_ms / 1e3

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        await self.send(inference_pb2.CallEvent(call=self._start.call, response=response))

    async def send(self, event: inference_pb2.CallEvent) -> None:
        async with self._writing:
            await self._stream.write(inference_pb2.GenerateManyResponse(events=[event]))

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Trailers = ()) -> None:
        if not trailers:  # as gRPC itself ends a call
            await self._stream.abort(code, message)
        raise Aborted(code, message, trailers)


async def generate_each(generate: Callable[[Any, Any], Any], requests: Any, context: Any) -> None:
    """`generate` has the form of Generate: a coroutine that writes, or a generator."""
    tasks: dict[int, asyncio.Task[None]] = {}
    writing = asyncio.Lock()

    async def run(start: inference_pb2.StartCall) -> None:
        call = CallContext(context, start, writing)
        ended = inference_pb2.CallEnded(status_code=0)
        try:
            answer = generate(start.request, call)
            is_generator = inspect.isasyncgen(answer)
            if is_generator:
                async for response in answer:
                    await call.write(response)
            else:
                await answer
        except Aborted as aborted:
            number, _ = aborted.code.value
            metadata = dict(aborted.trailers)
            ended = inference_pb2.CallEnded(status_code=number, message=aborted.message, metadata=metadata)
        await call.send(inference_pb2.CallEvent(call=start.call, ended=ended))

    try:
        async for message in requests:
            if message.HasField("start"):
                tasks[message.start.call] = asyncio.create_task(run(message.start))
            else:
                tasks[message.cancel].cancel()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
