"""The writers of a call: they take the chunks and the ends of its choices, and write them to the client.

`StreamWriter` writes to a gRPC stream. `SinkWriter` gives the parts to a sink of this process, such as the events of an
HTTP answer, in the same call of the event loop. Tokens that arrive before a writer takes them go into one chunk.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc.aio

from core.lifecycle import FinishReason
from core.service import Sink
from router.requests.events import Fail
from router.serving.choice_stream import MAX_CHUNK_ITEMS, ChoiceStream, Chunk
from router.serving.receipt import initial_metadata, trailing_metadata
from runtime.rpc.grpc_server import CallContext, LocalContext
from tandem_client.stubs import inference_pb2

TURN_ITEMS = MAX_CHUNK_ITEMS // 2  # as of MAX_CHUNK_ITEMS: log-probabilities take 7 us each, with their JSON

Context = grpc.aio.ServicerContext[Any, Any]
Part = Chunk | inference_pb2.Finished
LocalSink = Sink[Chunk, inference_pb2.Finished]


class CallWriter(ABC):
    """`context` names the caller and the deadline of the call."""

    context: CallContext

    def __init__(self) -> None:
        self._open: list[ChoiceStream] = []  # choices whose end is not taken
        self.receipts: list[inference_pb2.Receipt] = []  # of the choices that have ended

    def begin(self, streams: Sequence[ChoiceStream], min_interval_s: float, now: Callable[[], float]) -> None:
        """The choices of the call. `min_interval_s`: the least time between two chunks of a choice."""
        self._first, self._open = streams[0], list(streams)
        self._min_interval_s, self._now = min_interval_s, now

    @abstractmethod
    def changed(self) -> None:
        """The call has new tokens, or one of its choices has ended."""

    @abstractmethod
    async def write_all(self) -> None:
        """Write to the end of the last choice. Raises the error of the first choice that fails."""

    @property
    def is_due(self) -> bool:
        """`due` has something to give."""
        return any(stream.is_due or stream.result is not None for stream in self._open)

    def due(self) -> Iterator[Part]:
        """The parts to send now. Raises the error of the first choice that fails.

        A chunk has the tokens up to the moment at which the iterator reaches it.
        """
        ended = False
        for stream in self._open:
            if stream.is_due:
                if self._min_interval_s and stream.result is None:
                    stream.pause(self._min_interval_s)
                end = len(stream.token_ids)
                while stream.num_taken < end:
                    yield stream.take_chunk()
            ended = ended or stream.result is not None
        if ended:
            for stream in [stream for stream in self._open if stream.result is not None]:
                self._open.remove(stream)
                yield from self._last_parts(stream)

    def _last_parts(self, stream: ChoiceStream) -> Iterator[Part]:
        while stream.has_chunk:
            yield stream.take_chunk()
        if isinstance(stream.result, Fail):
            raise stream.result.error
        assert stream.result is not None
        last = stream.last_chunk()
        if last is not None:
            yield last
        if isinstance(stream.result, FinishReason):
            finished = stream.ended_before(stream.result)
        else:
            finished = stream.finished(stream.result.outcome, self._now())
        if stream.text.stop_match:
            finished.finish_reason = inference_pb2.FINISH_REASON_STOP
        self.receipts.append(finished.receipt)
        yield finished


class StreamWriter(CallWriter):
    """Writes each part to the gRPC stream of the call, as one message."""

    context: Context

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def write_all(self) -> None:
        """Tokens that arrive during a write go into the next message."""
        has_started = False
        while self._open:
            await self._changed.wait()
            self._changed.clear()
            promise = self._first.promise
            if promise is not None and not has_started:
                has_started = True  # the workers compute the prompt now, so Started delays no token
                await self.send_initial_metadata(initial_metadata(promise))
                await self.write(inference_pb2.GenerateResponse(started=self._first.started))
            for part in self.due():
                await self.write(message_of(part))
            if self.is_due:  # tokens that came during a write
                self._changed.set()
        self.set_trailing_metadata(trailing_metadata(self.receipts))

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        await self.context.write(response)

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self.context.send_initial_metadata(metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.context.set_trailing_metadata(metadata)


def message_of(part: Part) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    if isinstance(part, Chunk):
        part.fill(response.tokens)
    else:
        response.finished.CopyFrom(part)
    return response


class SinkWriter(CallWriter):
    """Gives the parts of a call to `sink` in the loop iteration after they came: the machine has then ended its event.

    While the sink is full, the tokens stay in their choices and go into one chunk later. A client that was behind has
    many: an iteration of the loop gives TURN_ITEMS or one chunk more, and the next iteration goes on.
    """

    def __init__(self, sink: LocalSink, context: LocalContext) -> None:
        super().__init__()
        self._sink, self.context = sink, context
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] | None = None  # None before `write_all`
        self._is_scheduled = False
        self._parts: Iterator[Part] | None = None  # the rest of what was due

    def changed(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._give)

    async def write_all(self) -> None:
        self._ended = self._loop.create_future()
        self.changed()
        await self._ended

    def _give(self) -> None:
        self._is_scheduled = False
        if self._ended is None or self._ended.done():
            return
        if self._sink.is_full:
            self._is_scheduled = True
            self._sink.when_room(self._give)
            return
        try:
            self._give_due(self._sink)
        except Exception as error:  # noqa: BLE001 - of the call, or of the sink: the caller of write_all gets both
            self._ended.set_exception(error)
            return
        if self._parts is None and not self._open:
            self._ended.set_result(None)

    def _give_due(self, sink: LocalSink) -> None:
        goes_on, self._parts = self._parts is not None, self._parts or self.due()
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
        if goes_on and self.is_due:  # tokens that came meanwhile
            self.changed()
