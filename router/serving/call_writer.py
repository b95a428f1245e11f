"""The client's end of one call: what it sent beside the request, and the place where its messages go."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc.aio

from protos import inference_pb2
from router.serving.call_messages import CallMessages
from router.serving.receipt import initial_metadata, trailing_metadata

Context = grpc.aio.ServicerContext[Any, Any]


class CallWriter(Protocol):
    def invocation_metadata(self) -> Any:
        """Pairs of name and value, as gRPC has them."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the client; None without one."""

    def changed(self) -> None:
        """The call has new tokens, or one of its choices has ended."""

    async def write_all(self, messages: CallMessages) -> None:
        """Write to the end of the last choice. Raises the error of the first choice that fails."""


class StreamWriter:
    """Writes each message to the gRPC stream of the call."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._changed = asyncio.Event()

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    def changed(self) -> None:
        self._changed.set()

    async def write_all(self, messages: CallMessages) -> None:
        """A message is as long as the client or a busy loop makes it: tokens that arrive meanwhile go into the next."""
        while not messages.have_ended:
            await self._changed.wait()
            self._changed.clear()
            promise = messages.take_promise()
            if promise is not None:
                await self.send_initial_metadata(initial_metadata(promise))
            for response in messages.due():
                await self.write(response)
        self.set_trailing_metadata(trailing_metadata(messages.receipts))

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        await self._context.write(response)

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self._context.send_initial_metadata(metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._context.set_trailing_metadata(metadata)
