"""A router over the wire, as the gateway calls it: `tandem_client.AsyncClient` with the errors of core/errors.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from core.errors import ErrorCode, QueueFull, TandemError
from core.service import Metadata
from gateway.router_calls import Sink
from runtime.rpc.api_keys import AUTHORIZATION, presented_key
from tandem_client import NO_RETRY, AsyncClient, CallFailed, Credentials
from tandem_client.stubs import cluster_pb2, inference_pb2

T = TypeVar("T")

AUTHORIZED_S = 10.0  # a key that a router has taken is not asked about again for this long
MAX_AUTHORIZED = 1024  # keys


class RemoteRouter:
    """A `gateway.router_calls.RouterCalls`. It retries no refusal: an HTTP client retries by itself. An answer whose
    router is lost goes on at one of the `others`, or at the router that listens at its address then."""

    def __init__(self, address: str, credentials: Credentials, others: Sequence[str] = ()) -> None:
        self.address = address
        self._client = AsyncClient(address, credentials, NO_RETRY)
        self._generating = AsyncClient((address, *others), credentials, NO_RETRY)
        self._authorized_at: dict[str | None, float] = {}  # by the key, oldest first

    async def open(self) -> None:
        await self._client.__aenter__()
        await self._generating.__aenter__()

    async def close(self) -> None:
        await self._generating.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)

    async def authorize(self, metadata: Metadata) -> None:
        """A router that takes a call without work takes the key."""
        key = presented_key(metadata)
        now = time.monotonic()
        if now - self._authorized_at.get(key, float("-inf")) < AUTHORIZED_S:
            return
        self._authorized_at.pop(key, None)
        await self.detokenize(
            inference_pb2.DetokenizeRequest(), [entry for entry in metadata if entry[0] == AUTHORIZATION]
        )
        self._authorized_at[key] = now
        if len(self._authorized_at) > MAX_AUTHORIZED:
            del self._authorized_at[next(iter(self._authorized_at))]

    async def generate(
        self, request: inference_pb2.GenerateRequest, sink: Sink, timeout_s: float, metadata: Metadata
    ) -> None:
        responses = self._generating.generate(request, timeout_s, tuple(metadata))
        try:
            async for response in responses:
                if sink.is_full:  # gRPC then holds the router back
                    room = asyncio.Event()
                    sink.when_room(room.set)
                    await room.wait()
                if response.HasField("tokens"):
                    sink.chunk(response.tokens)
                elif response.HasField("finished"):
                    sink.finished(response.finished)
        except CallFailed as error:
            raise tandem_error(error) from error
        finally:
            await asyncio.shield(responses.aclose())

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata
    ) -> inference_pb2.TokenizeResponse:
        return await answer(self._client.tokenize(request, metadata=tuple(metadata)))

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata
    ) -> inference_pb2.DetokenizeResponse:
        return await answer(self._client.detokenize(request, metadata=tuple(metadata)))

    async def model(self) -> inference_pb2.GetModelResponse:
        return await answer(self._client.model())

    async def metrics(self, metadata: Metadata) -> str:
        return await answer(self._client.metrics(tuple(metadata)))

    async def fleet(self, metadata: Metadata) -> cluster_pb2.GetFleetResponse:
        return await answer(self._client.fleet(metadata=tuple(metadata)))

    async def list_requests(self, limit: int, after: int, metadata: Metadata) -> cluster_pb2.ListRequestsResponse:
        return await answer(self._client.list_requests(limit, after, metadata=tuple(metadata)))

    async def get_trace(self, id: str, metadata: Metadata) -> cluster_pb2.Trace:
        return await answer(self._client.get_trace(id, metadata=tuple(metadata)))


def remote_routers(addresses: Sequence[str], credentials: Credentials) -> list[RemoteRouter]:
    """The routers of one fleet, each of which continues the answers of a lost one."""
    return [RemoteRouter(each, credentials, [other for other in addresses if other != each]) for each in addresses]


async def answer(call: Awaitable[T]) -> T:
    """The answer of `call`. Raises `TandemError`."""
    try:
        return await call
    except CallFailed as error:
        raise tandem_error(error) from error


def tandem_error(error: CallFailed) -> TandemError:
    """The error that the router raised, as far as its status and its trailers tell. Without the address of the router,
    which is no matter of HTTP clients."""
    text, pause_s = error.anonymous, error.retry_after_s
    found = TandemError(text) if pause_s is None else QueueFull(text, pause_s)
    found.code = ErrorCode.__members__.get(error.code.name, ErrorCode.INTERNAL)
    found.field, found.retryable = error.field, error.retryable
    return found
