"""The router's end of the token stream of one decode worker.

    CLOSED --open--> OPEN: the worker's first, empty message has arrived --broken--> CLOSED, and TokenStreamLost

The worker ends the Decode calls of a stream that breaks, and the machine retries them. So `open` draws a new id each
time: a call that names an older stream is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from core.errors import InvalidRequest
from core.lifecycle import MoveReason
from core.step import SampledToken
from protos import codec
from router.requests import events
from router.requests.events import RouterEvent
from runtime.rpc.grpc_server import cancel_and_wait, error_from
from tandem_client.stubs import worker_pb2

logger = logging.getLogger(__name__)


class TokenStreamReader:
    """`post` sends an event to the router's machine. `on_broken` is called after the loss of an open stream."""

    def __init__(
        self, worker_id: str, router_id: str, post: Callable[[RouterEvent], None], on_broken: Callable[[], None]
    ) -> None:
        self._worker_id = worker_id
        self._router_id = router_id
        self._post = post
        self._on_broken = on_broken
        self._reading: asyncio.Task[None] | None = None
        self.stream_id = 0  # of the open stream; 0 = closed

    async def open(self, stub: Any, metadata: list[tuple[str, str]]) -> None:
        """Open a stream unless one is open. Cancel it to give up.

        Raises `grpc.aio.AioRpcError`.
        """
        if self.stream_id:
            return
        stream_id = secrets.randbits(64) or 1
        request = worker_pb2.StreamTokensRequest(router_id=self._router_id, stream_id=stream_id)
        messages = stub.StreamTokens(request, metadata=metadata)
        try:
            await messages.read()
        except BaseException:
            messages.cancel()
            raise
        self.stream_id = stream_id
        self._reading = asyncio.create_task(self._read(messages), name=f"tokens-{self._worker_id}")

    def lose(self, stream_id: int, detail: str) -> None:
        """A Decode call has told that this stream ended. The error of the stream may wait behind tokens."""
        if stream_id == self.stream_id != 0:
            assert self._reading is not None
            self._reading.cancel()
            self._report_loss(detail)

    def _report_loss(self, detail: str) -> None:
        self.stream_id = 0
        self._post(events.TokenStreamLost(self._worker_id, detail))
        self._on_broken()

    @property
    def reading(self) -> list[asyncio.Task[None]]:
        """The task that reads the newest stream; none before the first `open`."""
        return [] if self._reading is None else [self._reading]

    async def close(self) -> None:
        """Posts nothing: the caller ends the calls of this stream itself."""
        self.stream_id = 0
        await cancel_and_wait(self.reading)

    async def _read(self, messages: Any) -> None:
        detail = "the worker ended the stream"
        try:
            while (message := await messages.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._post(decode_step_tokens(message))
        except grpc.aio.AioRpcError as error:
            detail = str(error_from(error))
        except Exception as error:
            logger.exception("the token stream of worker %s failed in the router", self._worker_id)
            detail = f"{type(error).__name__}: {error}"
        finally:
            messages.cancel()
        self._report_loss(detail)


def decode_step_tokens(wire: worker_pb2.StepTokens) -> events.StepTokens:
    """Raises `InvalidRequest` if the columns do not fit together."""
    calls = list(wire.calls)
    if not len(calls) == len(wire.indexes) == len(wire.token_ids):
        sizes = f"{len(calls)}, {len(wire.indexes)} and {len(wire.token_ids)}"
        raise InvalidRequest("calls, indexes, token_ids", f"must have equal lengths, have {sizes}")
    token_ids = list(wire.token_ids)
    logprobs: dict[int, SampledToken] = {}
    if wire.logprobs:
        if len(wire.logprob_places) != len(wire.logprobs) or max(wire.logprob_places) >= len(calls):
            raise InvalidRequest("logprob_places", "must have one place in the columns for each entry of logprobs")
        for place, found in zip(wire.logprob_places, wire.logprobs, strict=True):
            logprobs[place] = codec.decode_logprobs(token_ids[place], found)
    moves = tuple(
        events.MoveNotice(
            notice.call,
            notice.first_index if notice.HasField("first_index") else None,
            MoveReason.ROOM if notice.lacks_room else MoveReason.DRAIN,
        )
        for notice in wire.moves
    )
    return events.StepTokens(calls, list(wire.indexes), token_ids, logprobs, moves)
