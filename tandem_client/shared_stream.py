"""Many Generate calls over one gRPC stream (GenerateMany in protos/inference.proto), which costs both ends less CPU.

A call keeps its own deadline, errors and cancellation. The stream opens with the first call, and again with the first
call after it has ended. Tokens wait here for a reader that is slow, joined into one message for each choice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from tandem_client.credentials import Metadata
from tandem_client.errors import CallFailed, call_failed, deadline_exceeded, failure_of, went_away
from tandem_client.stubs import inference_pb2

# A message over router.max_message_bytes, at least 512 KiB, ends its gRPC call: a shared stream with all calls in it.
MAX_SHARED_REQUEST_BYTES = 256 * 1024
MAX_STREAMS = 3  # that one call tries, while routers stop
MAX_TIMEOUT_S = 1e7  # a longer one is no limit

# grpc.aio writes this over the status of a stream that ends during a write (grpc/grpc#36066).
WRITE_FAILED = (grpc.StatusCode.INTERNAL, "Internal error from Core")

STATUS_OF_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

logger = logging.getLogger(__name__)


class NotStarted(Exception):
    """The router stopped before it took the call."""


def can_share(request: inference_pb2.GenerateRequest, metadata: Metadata) -> bool:
    """Whether the call fits into a shared stream: it is not large, and has each name once in its metadata."""
    num_bytes = request.ByteSize() + sum(len(name) + len(value) for name, value in metadata)
    names = {name for name, _ in metadata}
    return num_bytes <= MAX_SHARED_REQUEST_BYTES and len(names) == len(metadata)


class SharedStreams:
    """`open_stream` makes a GenerateMany call. Runs on one event loop."""

    def __init__(self, address: str, open_stream: Callable[[], Any]) -> None:
        self._address = address
        self._open_stream = open_stream
        self._stream: SharedStream | None = None

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of one call that can share a stream. Raises `CallFailed`."""
        deadline = asyncio.get_running_loop().time() + min(timeout_s, MAX_TIMEOUT_S)
        for _ in range(MAX_STREAMS):
            stream = self._current()
            call = stream.start(request, metadata, deadline, deadline_exceeded(self._address, timeout_s))
            try:
                while (response := await call.next()) is not None:
                    yield response
                return
            except NotStarted:
                stream.takes_calls = False
            finally:
                stream.leave(call)
        message = f"the router at {self._address} takes no call: it stops, or is of another version"
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, message, retryable=True)

    def _current(self) -> SharedStream:
        if self._stream is None or not self._stream.takes_calls:
            self._stream = SharedStream(self._address, self._open_stream())
        return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class SharedStream:
    def __init__(self, address: str, stream: Any) -> None:
        self._address = address
        self._stream = stream
        self._calls: dict[int, SharedCall] = {}  # open ones
        self._num_started = 0
        self._unsent: dict[int, inference_pb2.GenerateManyRequest] = {}  # starts of open calls
        self._cancels: deque[int] = deque()  # of calls whose start is sent
        self._has_outgoing = asyncio.Event()
        self._has_ended = False
        self.takes_calls = True
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    def start(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata, deadline: float, expired: CallFailed
    ) -> SharedCall:
        """`deadline` is in the time of the event loop; `expired` is the error at that time."""
        number = self._num_started = self._num_started + 1
        start = inference_pb2.StartCall(call=number, request=request, metadata=dict(metadata))
        call = self._calls[number] = SharedCall(number, deadline, expired)
        self._unsent[number] = inference_pb2.GenerateManyRequest(start=start)
        self._has_outgoing.set()
        return call

    def leave(self, call: SharedCall) -> None:
        """Cancel the call if it is open."""
        call.stop_timer()
        if self._calls.pop(call.number, None) is None or call.has_ended or self._has_ended:
            return
        if self._unsent.pop(call.number, None) is None:
            self._cancels.append(call.number)
            self._has_outgoing.set()

    def close(self) -> None:
        """End every call with an error."""
        self._end(lambda _: CallFailed(grpc.StatusCode.CANCELLED, "the client is closed"))
        self._stream.cancel()
        self._writing.cancel()
        self._reading.cancel()

    def _end(self, failure: Callable[[SharedCall], Exception]) -> None:
        self._has_ended, self.takes_calls = True, False
        for call in self._calls.values():
            call.fail(failure(call))

    async def _write(self) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                while self._unsent or self._cancels:
                    await self._stream.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader gets the reason

    def _next_message(self) -> inference_pb2.GenerateManyRequest:
        if self._cancels:
            return inference_pb2.GenerateManyRequest(cancel=self._cancels.popleft())
        number = next(iter(self._unsent))
        message = self._unsent.pop(number)
        message.start.timeout_ms = max(1.0, self._calls[number].left_s * 1e3)
        return message

    async def _read(self) -> None:
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                for event in message.events:
                    call = self._calls.get(event.call)
                    if call is not None:
                        call.take(event)
        except grpc.aio.AioRpcError as error:
            broken = error
            if (broken.code(), broken.details()) == WRITE_FAILED:
                self._end(self._without_status)
            else:
                self._end(lambda call: call_failed(broken, self._address, 0.0, call.has_begun))
        except Exception as error:
            logger.exception("a shared stream failed")
            detail = f"{type(error).__name__}: {error}"
            self._end(lambda _: CallFailed(grpc.StatusCode.INTERNAL, detail))
            self._stream.cancel()
        else:
            self._end(self._without_status)
        finally:
            self._writing.cancel()

    def _without_status(self, call: SharedCall) -> Exception:
        """A router ends the stream with OK after the last end of a call that it has read."""
        if not call.has_begun:
            return NotStarted()
        return went_away(self._address)


class SharedCall:
    def __init__(self, number: int, deadline: float, expired: CallFailed) -> None:
        self.number = number
        self.has_begun = False
        self.has_ended = False  # by an event of the router
        self._waiting: deque[WaitingMessage] = deque()
        self._last_chunk: dict[int, WaitingMessage] = {}  # in `_waiting`, by choice
        self._direct: inference_pb2.GenerateResponse | None = None  # for the reader, which waits
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._reader: asyncio.Future[None] | None = None
        self._timer = self._loop.call_at(deadline, self.fail, expired)

    @property
    def left_s(self) -> float:
        return self._deadline - self._loop.time()

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """The next message; None after the last. Raises `CallFailed` and `NotStarted`."""
        while True:
            if self._direct is not None:
                response, self._direct = self._direct, None
                return response
            if self._waiting:
                message = self._waiting.popleft()
                if message.is_chunk:
                    del self._last_chunk[message.choice]
                return message.complete()
            if self._failure is not None:
                raise self._failure
            if self.has_ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader

    def take(self, event: inference_pb2.CallEvent) -> None:
        if event.HasField("ended"):
            self._end(event.ended)
            return
        self.has_begun = True
        response, reader = event.response, self._reader
        if reader is not None and not reader.done() and self._direct is None and not self._waiting:
            self._direct = response
            reader.set_result(None)
            return
        chunk = self._last_chunk.get(response.tokens.choice) if response.HasField("tokens") else None
        if chunk is not None:
            chunk.join(response.tokens)
            return
        message = WaitingMessage(response)
        self._waiting.append(message)
        if message.is_chunk:
            self._last_chunk[message.choice] = message

    def fail(self, failure: Exception) -> None:
        """End the call, after the messages that wait, unless it has failed already."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    def stop_timer(self) -> None:
        self._timer.cancel()

    def _end(self, ended: inference_pb2.CallEnded) -> None:
        self.has_ended = True
        if ended.not_started:
            self.fail(NotStarted())
        elif ended.status_code:
            code = STATUS_OF_NUMBER.get(ended.status_code, grpc.StatusCode.UNKNOWN)
            self.fail(failure_of(code, ended.message, dict(ended.metadata)))
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class WaitingMessage:
    """A copy of a message whose reader is busy. A part of a received message would keep the whole in memory."""

    def __init__(self, response: inference_pb2.GenerateResponse) -> None:
        self._response = inference_pb2.GenerateResponse()
        self._response.CopyFrom(response)
        self.is_chunk = response.HasField("tokens")
        self.choice = response.tokens.choice
        self._texts = [response.tokens.text]

    def join(self, chunk: inference_pb2.TokenChunk) -> None:
        self._texts.append(chunk.text)
        self._response.tokens.token_ids.extend(chunk.token_ids)
        self._response.tokens.logprobs.extend(chunk.logprobs)

    def complete(self) -> inference_pb2.GenerateResponse:
        if self.is_chunk:
            self._response.tokens.text = "".join(self._texts)
        return self._response
