"""The calls of one GenerateMany stream.

    start     a task for the call: admission, validation, dispatch; then it waits for the end
    tokens    mark the call as due
    writer    one message with the events of all due calls

The writer takes the tokens of a call when it writes them. So a slow client gets fewer and longer messages, and nothing
else of a call waits here. First tokens go before the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from core.config import MIN_MESSAGE_BYTES
from core.errors import InvalidRequest, QueueFull, TandemError, WorkerUnavailable
from protos import inference_pb2
from router.serving.call_messages import CallMessages
from router.serving.call_writer import CallWriter, Context
from runtime.rpc.grpc_server import STATUS_OF, cancel_and_wait, trailers_of

MAX_OPEN_CALLS = 4096
MAX_ENDED_CALLS = 1024  # with an error that waits for the writer. Beyond them, nothing is read from the client
# A message that exceeds router.max_message_bytes would end every call of the stream. The last event in a message may
# exceed this size by one chunk (router/serving/choice_stream.py).
MESSAGE_BYTES = MIN_MESSAGE_BYTES // 4
MAX_TIMEOUT_MS = 1e10  # a longer one is no limit

logger = logging.getLogger(__name__)

CountRefusal = Callable[[TandemError], None]
Serve = Callable[[inference_pb2.GenerateRequest, CallWriter], Awaitable[None]]


class SharedStream:
    """`serve` serves one call, and raises `TandemError`. `count_refusal` takes each call that is refused before."""

    def __init__(self, context: Context, serve: Serve, count_refusal: CountRefusal, is_draining: bool) -> None:
        self._context = context
        self._serve = serve
        self._count_refusal = count_refusal
        self._calls: dict[int, SharedCall] = {}
        self._first: dict[SharedCall, None] = {}  # calls with their first messages due, in order
        self._due: dict[SharedCall, None] = {}  # the others with messages due, in order
        self._ended: deque[inference_pb2.CallEvent] = deque()
        self._changed = asyncio.Event()  # there may be something to write, or the stream may end
        self._has_room = asyncio.Event()
        self._is_draining = is_draining
        self._client_has_closed = False
        self._fault: TandemError | None = None

    async def serve_all(self, requests: Any) -> None:
        """Serve until the client has closed its side, or the router drains, and every call has ended.

        Raises `InvalidRequest` for a message that breaks the rules of the stream, which ends all calls.
        """
        reading = asyncio.create_task(self._read(requests))
        try:
            await self._write_all()
            if self._fault is not None:
                raise self._fault
        finally:
            await cancel_and_wait([reading, *(call.task for call in self._calls.values() if call.task is not None)])

    def drain(self) -> None:
        """Refuse new calls, and end with the last open one."""
        self._is_draining = True
        self._changed.set()

    def mark(self, call: SharedCall) -> None:
        (self._due if call.has_begun else self._first)[call] = None
        self._changed.set()

    # ---- from the client

    async def _read(self, requests: Any) -> None:
        try:
            async for message in requests:
                match message.WhichOneof("action"):
                    case "start":
                        self._start(message.start)
                    case "cancel":
                        self._cancel(message.cancel)
                    case _:
                        raise InvalidRequest("action", "must be start or cancel, is not set")
                while len(self._ended) >= MAX_ENDED_CALLS:
                    self._has_room.clear()
                    await self._has_room.wait()
        except TandemError as error:
            self._fault = error
        finally:
            self._client_has_closed = True
            self._changed.set()

    def _start(self, start: inference_pb2.StartCall) -> None:
        if start.call in self._calls:
            raise InvalidRequest("start.call", f"must be new in the stream, {start.call} is open")
        if not start.timeout_ms >= 0:
            raise InvalidRequest("start.timeout_ms", f"must be at least 0, is {start.timeout_ms:g}")
        if self._is_draining:
            self._end(start.call, WorkerUnavailable("the router stops"), not_started=True)
        elif len(self._calls) >= MAX_OPEN_CALLS:
            refused = QueueFull(f"this stream has {MAX_OPEN_CALLS} open calls")
            self._count_refusal(refused)
            self._end(start.call, refused)
        else:
            call = self._calls[start.call] = SharedCall(self, start)
            call.task = asyncio.create_task(self._run(call, start.request))
            call.task.add_done_callback(lambda _: self._forget(call))

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def _run(self, call: SharedCall, request: inference_pb2.GenerateRequest) -> None:
        try:
            await self._serve(request, call)
        except TandemError as error:
            self._end(call.number, error)
        except Exception as error:
            logger.exception("a call of a shared stream failed in the router")
            self._end(call.number, TandemError(f"{type(error).__name__}: {error}"))

    def _forget(self, call: SharedCall) -> None:
        del self._calls[call.number]
        self._first.pop(call, None)
        self._due.pop(call, None)
        self._changed.set()

    def _end(self, number: int, error: TandemError, not_started: bool = False) -> None:
        status_code, _ = STATUS_OF[error.code].value
        text = str(error).encode("utf-8", "replace").decode()  # lone surrogates are no text for protobuf
        ended = inference_pb2.CallEnded(
            status_code=status_code, message=text, metadata=dict(trailers_of(error)), not_started=not_started
        )
        self._ended.append(inference_pb2.CallEvent(call=number, ended=ended))
        self._changed.set()

    # ---- to the client

    async def _write_all(self) -> None:
        while True:
            while self._first or self._due or self._ended:
                message = self._next_message()
                if message.events:
                    await self._context.write(message)
            if self._fault is not None or ((self._client_has_closed or self._is_draining) and not self._calls):
                return
            await self._changed.wait()
            self._changed.clear()

    def _next_message(self) -> inference_pb2.GenerateManyResponse:
        message = inference_pb2.GenerateManyResponse()
        room = MESSAGE_BYTES
        while room > 0 and (due := self._first or self._due):
            call = next(iter(due))
            del due[call]
            room -= call.add_due(message.events, room)
        while room > 0 and self._ended:
            event = self._ended.popleft()
            message.events.append(event)
            room -= event.ByteSize()
        self._has_room.set()
        return message


class SharedCall:
    """A `CallWriter`."""

    def __init__(self, stream: SharedStream, start: inference_pb2.StartCall) -> None:
        self.number = start.call
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False  # a message of this call is written
        self._stream = stream
        self._metadata = tuple(start.metadata.items())
        timeout_s = min(start.timeout_ms, MAX_TIMEOUT_MS) / 1e3
        self._deadline = time.monotonic() + timeout_s if timeout_s else None
        self._messages: CallMessages | None = None
        self._responses: Iterator[inference_pb2.GenerateResponse] | None = None  # of a message that was full
        self._events: Any = None  # of the message in the making
        self._written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def changed(self) -> None:
        self._stream.mark(self)

    async def write_all(self, messages: CallMessages) -> None:
        self._messages = messages
        self._stream.mark(self)
        await self._written

    def add_due(self, events: Any, room: int) -> int:
        """Add the events of this call that are due, until they have `room` bytes. Returns their size.

        The events without room are due again.
        """
        if self._messages is None or self._written.done():
            return 0
        self._events = events
        is_continued = self._responses is not None
        if self._responses is None:
            self._responses = self._messages.due(self._new_response)
        num_bytes = 0
        try:
            for response in self._responses:
                self.has_begun = True
                num_bytes += response.ByteSize()
                if num_bytes >= room:
                    self._stream.mark(self)
                    return num_bytes
        except Exception as error:  # noqa: BLE001  `write_all` raises it
            self._written.set_exception(error)
            return num_bytes
        self._responses = None
        if is_continued:
            self._stream.mark(self)  # for choices that it had passed before their newest tokens came
        if self._messages.have_ended:
            events.add(call=self.number).ended.SetInParent()  # status OK
            self._written.set_result(None)
        return num_bytes

    def _new_response(self) -> inference_pb2.GenerateResponse:
        response: inference_pb2.GenerateResponse = self._events.add(call=self.number).response
        return response
