"""Many Generate calls over one gRPC stream (GenerateMany in protos/inference.proto), which costs both ends less CPU.

A call keeps its own deadline, errors and cancellation. The stream opens with the first call, and again with the first
call after it has ended. Tokens that the reader of a call does not take are joined, and wait here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from tandem_client.credentials import Metadata
from tandem_client.errors import CallFailed, call_failed, deadline_exceeded, failure_of
from tandem_client.stubs import inference_pb2

# A message over router.max_message_bytes (at least 512 KiB) ends its gRPC call, and with a shared stream all calls in it.
MAX_SHARED_REQUEST_BYTES = 256 * 1024
MAX_JOINED_CHARS = 4096  # of a message that takes the text of the next one
MAX_STREAMS = 3  # that one call tries, while routers stop

STATUS_OF_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class NotStarted(Exception):
    """The router stopped before it took the call."""


class SharedStreams:
    """`open_stream` makes a GenerateMany call. Runs on one event loop."""

    def __init__(self, address: str, open_stream: Callable[[], Any]) -> None:
        self._address = address
        self._open_stream = open_stream
        self._stream: SharedStream | None = None

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of one call. Raises `CallFailed`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for _ in range(MAX_STREAMS):
            stream = self._current()
            call = stream.start(request, deadline, timeout_s, metadata)
            try:
                while (response := await call.next()) is not None:
                    yield response
                return
            except NotStarted:
                stream.is_over = True
            finally:
                stream.leave(call)
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"the router at {self._address} stops", retryable=True)

    def _current(self) -> SharedStream:
        if self._stream is None or self._stream.is_over:
            self._stream = SharedStream(self._address, self._open_stream())
        return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class SharedStream:
    def __init__(self, address: str, stream: Any) -> None:
        self._address = address
        self._stream = stream
        self._calls: dict[int, SharedCall] = {}
        self._num_started = 0
        self._outgoing: deque[inference_pb2.GenerateManyRequest] = deque()  # at most two for each call
        self._has_outgoing = asyncio.Event()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))
        self.is_over = False  # no call can start

    def start(
        self, request: inference_pb2.GenerateRequest, deadline: float, timeout_s: float, metadata: Metadata
    ) -> SharedCall:
        """`deadline` is in the time of the event loop; `timeout_s` is for the message of an error."""
        self._num_started += 1
        left_s = deadline - asyncio.get_running_loop().time()
        expired = deadline_exceeded(self._address, timeout_s)
        call = self._calls[self._num_started] = SharedCall(self._num_started, deadline, expired)
        start = inference_pb2.StartCall(
            call=call.number, request=request, timeout_ms=max(1.0, left_s * 1e3), metadata=dict(metadata)
        )
        self._send(inference_pb2.GenerateManyRequest(start=start))
        return call

    def leave(self, call: SharedCall) -> None:
        """Cancel the call if it has not ended."""
        call.close()
        if self._calls.pop(call.number, None) is not None and not call.has_ended and not self.is_over:
            self._send(inference_pb2.GenerateManyRequest(cancel=call.number))

    def close(self) -> None:
        self.is_over = True
        self._stream.cancel()
        for task in self._tasks:
            task.cancel()

    def _send(self, message: inference_pb2.GenerateManyRequest) -> None:
        self._outgoing.append(message)
        self._has_outgoing.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                while self._outgoing:
                    await self._stream.write(self._outgoing.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader gets the reason

    async def _read(self) -> None:
        failure: Exception = CallFailed(grpc.StatusCode.CANCELLED, "the client is closed")
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                for event in message.events:
                    call = self._calls.get(event.call)
                    if call is not None:
                        call.take(event)
            failure = NotStarted()  # a router ends the stream after every call that it has read
        except grpc.aio.AioRpcError as error:
            failure = error
        finally:
            self.is_over = True
            self._tasks[1].cancel()
            for call in self._calls.values():
                call.lose(failure, self._address)


class SharedCall:
    def __init__(self, number: int, deadline: float, expired: CallFailed) -> None:
        self.number = number
        self.has_ended = False
        self._has_begun = False
        self._pending: deque[inference_pb2.GenerateResponse] = deque()
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # of `next`
        self._timer = self._loop.call_at(deadline, self._fail, expired)

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """The next message; None after the last. Raises `CallFailed` and `NotStarted`."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if self.has_ended:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._pending.popleft()

    def take(self, event: inference_pb2.CallEvent) -> None:
        if event.HasField("ended"):
            self._end(event.ended)
            return
        self._has_begun = True
        response = event.response
        if not self._pending or not _joined(self._pending[-1], response):
            self._pending.append(response)
        self._wake()

    def lose(self, failure: Exception, address: str) -> None:
        """The stream has ended before the call."""
        self.has_ended = True
        if isinstance(failure, NotStarted) and self._has_begun:
            failure = CallFailed(grpc.StatusCode.INTERNAL, f"the router at {address} left out the end of the answer")
        if isinstance(failure, grpc.aio.AioRpcError):
            failure = call_failed(failure, address, 0.0, self._has_begun)
        self._fail(failure)

    def close(self) -> None:
        self._timer.cancel()

    def _end(self, ended: inference_pb2.CallEnded) -> None:
        self.has_ended = True
        if ended.not_started:
            self._fail(NotStarted())
        elif ended.status_code:
            code = STATUS_OF_NUMBER.get(ended.status_code, grpc.StatusCode.UNKNOWN)
            self._fail(failure_of(code, ended.message, dict(ended.metadata)))
        self._wake()

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(last: inference_pb2.GenerateResponse, response: inference_pb2.GenerateResponse) -> bool:
    """Whether `last`, which nobody has read, could take the tokens of `response`."""
    if not (last.HasField("tokens") and response.HasField("tokens")):
        return False
    chunk, more = last.tokens, response.tokens
    if chunk.choice != more.choice or len(chunk.text) + len(more.text) > MAX_JOINED_CHARS:
        return False
    chunk.text += more.text
    chunk.token_ids.extend(more.token_ids)
    chunk.logprobs.extend(more.logprobs)
    return True
