"""A thin client of a running router: every call has a deadline, and every failure is one line that says what to do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar, cast

import grpc
import grpc.aio

from core.errors import DeadlineExceeded, InvalidRequest, TandemError, Unauthenticated, WorkerUnavailable
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from runtime.grpc_server import MAX_GRPC_MESSAGE_BYTES, RETRYABLE_KEY, error_from, open_channel
from runtime.security import OPEN, Credentials

CALL_TIMEOUT_S = 10.0
ASK_AGAIN_S = 0.05

T = TypeVar("T")


class Client:
    """Use `connect`; the connection is made by the first call."""

    def __init__(self, address: str, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        self.address = address
        self._token = credentials.metadata
        self._inference = inference_pb2_grpc.InferenceStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(channel)

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Raises `TandemError`. Leaving the loop early cancels the request everywhere."""
        call = self._inference.Generate(request, timeout=timeout_s)
        begun = False
        try:
            async for response in call:
                begun = True
                yield response
        except grpc.aio.AioRpcError as error:
            if begun and error.code() is grpc.StatusCode.UNAVAILABLE and not _is_answer(error):
                raise WorkerUnavailable(f"the router at {self.address} went away in the middle; ask again") from error
            raise self._explain(error, timeout_s) from error
        finally:
            call.cancel()

    async def model(self) -> inference_pb2.GetModelResponse:
        return await self._call(self._inference.GetModel(inference_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S))

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        return await self._call(self._cluster.GetFleet(cluster_pb2.GetFleetRequest(), timeout=CALL_TIMEOUT_S))

    async def ledger(self) -> cluster_pb2.GetLedgerResponse:
        request = cluster_pb2.GetLedgerRequest()
        return await self._call(self._cluster.GetLedger(request, timeout=CALL_TIMEOUT_S, metadata=self._token))

    async def scale(self, prefill: int | None, decode: int | None) -> cluster_pb2.ScaleResponse:
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode)
        return await self._call(self._cluster.Scale(request, timeout=CALL_TIMEOUT_S, metadata=self._token))

    async def wait_until_known(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Until the router has heard from that many serving workers of each pool. Raises `WorkerUnavailable`.

        It asks again and again: the API has no stream of the fleet's state, and this happens once, at a start.
        """
        wanted = {worker_pb2.WORKER_ROLE_PREFILL: prefill, worker_pb2.WORKER_ROLE_DECODE: decode}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    workers = (await self.fleet()).workers
                    serving = Counter(w.role for w in workers if w.state == worker_pb2.WORKER_STATE_SERVING)
                    if all(serving[role] >= count for role, count in wanted.items()):
                        return
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise WorkerUnavailable(
                f"the router at {self.address} has not heard from every worker within {timeout_s:g} s"
            ) from None

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._explain(error, CALL_TIMEOUT_S) from error

    def _explain(self, error: grpc.aio.AioRpcError, timeout_s: float) -> TandemError:
        answered = _is_answer(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE and not answered:
            if "refused" in (error.details() or ""):
                return WorkerUnavailable(f"no router at {self.address}; start one with `tandem serve`")
            return WorkerUnavailable(
                f"no answer from {self.address}: it is out of reach, or its TLS and ours do not fit (--config)"
            )
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not answered:
            return DeadlineExceeded(f"no answer from {self.address} within {timeout_s:g} s; see `tandem status`")
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(
                f"the router at {self.address} wants its cluster's token; name it in the [security] table of --config"
            )
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not answered:
            return TandemError(f"too large a message for {self.address} (router.max_message_bytes): {error.details()}")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return TandemError(f"what answers at {self.address} is no router of this version: {error.details()}")
        return error_from(error)


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Did a router say this, or gRPC?"""
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return RETRYABLE_KEY in dict(trailers)


Connection = AbstractAsyncContextManager[Client]


@asynccontextmanager
async def connect(address: str, credentials: Credentials = OPEN) -> AsyncIterator[Client]:
    """Raises `InvalidRequest` for what is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidRequest("router", f"must be host:port, is {address!r}")
    channel = open_channel(address, MAX_GRPC_MESSAGE_BYTES, credentials)
    try:
        yield Client(address, channel, credentials)
    finally:
        await channel.close(grace=None)
