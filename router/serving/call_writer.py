"""The writers of a call: they hold the metadata of the client and write the parts of the answer.

`StreamWriter` writes to a gRPC stream. `SinkWriter` gives the parts to a sink of this process, such as the events of an
HTTP answer, in the same call of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Protocol

import grpc.aio

from core.service import Metadata, Sink
from router.serving.call_messages import CallMessages, Part
from router.serving.choice_stream import MAX_CHUNK_ITEMS, Chunk
from router.serving.receipt import initial_metadata, trailing_metadata
from tandem_client.stubs import inference_pb2

TURN_ITEMS = MAX_CHUNK_ITEMS // 2  # as of MAX_CHUNK_ITEMS: log-probabilities take 7 us each, with their JSON

Context = grpc.aio.ServicerContext[Any, Any]
LocalSink = Sink[Chunk, inference_pb2.Finished]


class CallWriter(Protocol):
    def invocation_metadata(self) -> Any:
        """Pairs of name and value, as gRPC has them."""

    def peer(self) -> str:
        """The address of the caller, as gRPC has it; empty for a call of this process."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the client; None without one."""

    def changed(self) -> None:
        """The call has new tokens, or one of its choices has ended."""

    async def write_all(self, messages: CallMessages) -> None:
        """Write to the end of the last choice. Raises the error of the first choice that fails."""


class StreamWriter:
    """Writes each part to the gRPC stream of the call, as one message."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._changed = asyncio.Event()

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def peer(self) -> str:
        return self._context.peer()

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    def changed(self) -> None:
        self._changed.set()

    async def write_all(self, messages: CallMessages) -> None:
        """Tokens that arrive during a write go into the next message."""
        while not messages.have_ended:
            await self._changed.wait()
            self._changed.clear()
            promise = messages.take_promise()
            if promise is not None:  # the workers compute the prompt now, so Started delays no token
                await self.send_initial_metadata(initial_metadata(promise))
                await self.write(inference_pb2.GenerateResponse(started=messages.started))
            for part in messages.due():
                await self.write(message_of(part))
            if messages.is_due:  # tokens that came during a write
                self._changed.set()
        self.set_trailing_metadata(trailing_metadata(messages.receipts))

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        await self._context.write(response)

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self._context.send_initial_metadata(metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._context.set_trailing_metadata(metadata)


def message_of(part: Part) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    if isinstance(part, Chunk):
        part.fill(response.tokens)
    else:
        response.finished.CopyFrom(part)
    return response


class SinkWriter:
    """Gives the parts of a call to `sink` in the loop iteration after they came: the machine has then ended its event.

    While the sink is full, the tokens stay in their choices and go into one chunk later. A client that was behind has
    many: an iteration of the loop gives TURN_ITEMS or one chunk more, and the next iteration goes on.
    """

    def __init__(self, sink: LocalSink, metadata: Metadata, timeout_s: float) -> None:
        self._sink, self._metadata, self._timeout_s = sink, metadata, timeout_s
        self._loop = asyncio.get_running_loop()
        self._messages: CallMessages | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_scheduled = False
        self._parts: Iterator[Part] | None = None  # the rest of what was due

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return ""

    def time_remaining(self) -> float | None:
        return self._timeout_s

    def changed(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._give)

    async def write_all(self, messages: CallMessages) -> None:
        self._messages = messages
        self.changed()
        await self._ended

    def _give(self) -> None:
        self._is_scheduled = False
        messages, sink = self._messages, self._sink
        if messages is None or self._ended.done():
            return
        if sink.is_full:
            self._is_scheduled = True
            sink.when_room(self._give)
            return
        try:
            self._give_due(messages, sink)
        except Exception as error:  # noqa: BLE001 - of the call, or of the sink: the caller of write_all gets both
            self._ended.set_exception(error)
            return
        if self._parts is None and messages.have_ended:
            self._ended.set_result(None)

    def _give_due(self, messages: CallMessages, sink: LocalSink) -> None:
        goes_on, self._parts = self._parts is not None, self._parts or messages.due()
        num_items = 0
        for part in self._parts:
            if not isinstance(part, Chunk):
                sink.finished(part)
                continue
            sink.chunk(part)
            num_items += part.num_items
            if num_items >= TURN_ITEMS:
                self.changed()
                return
        self._parts = None
        if goes_on and messages.is_due:  # tokens that came meanwhile
            self.changed()
