"""Two clients with the same calls: `AsyncClient` for asyncio, `Client` for everything else.

Every call has a deadline, every failure is a `CallFailed`. The connection is made by the first call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from tandem_client.credentials import OPEN, Credentials
from tandem_client.errors import CallFailed, call_failed
from tandem_client.stubs import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 10.0

Metadata = Sequence[tuple[str, str]]

T = TypeVar("T")


class AsyncClient:
    """Use it in `async with`, on one event loop. Raises `CallFailed` for an address that is not host:port."""

    def __init__(self, address: str, credentials: Credentials = OPEN) -> None:
        self.address = _checked(address)
        self._credentials = credentials

    async def __aenter__(self) -> AsyncClient:
        """Open the channel here, because a grpc.aio channel belongs to the running loop."""
        tls, options = self._credentials.for_channel(), self._credentials.options()
        self._channel = (
            grpc.aio.insecure_channel(self.address, options=options)
            if tls is None
            else grpc.aio.secure_channel(self.address, tls, options=options)
        )
        self._token = self._credentials.metadata
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight."""
        await self._channel.close(grace=None)

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the answer. Leaving the loop early cancels the request on every worker.

        `metadata`: headers of the call, e.g. ("traceparent", ...) or ("authorization", "Bearer KEY").
        """
        call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        streaming = False
        try:
            async for response in call:
                streaming = True
                yield response
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self.address, timeout_s, streaming) from error
        finally:
            call.cancel()

    async def model(self) -> inference_pb2.GetModelResponse:
        return await self._answer(self._inference.GetModel, inference_pb2.GetModelRequest())

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        return await self._answer(self._inference.Tokenize, request)

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        return await self._answer(self._inference.Detokenize, request)

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        return await self._answer(self._cluster.GetFleet, cluster_pb2.GetFleetRequest())

    async def explain(self, request: inference_pb2.GenerateRequest) -> cluster_pb2.ExplainResponse:
        return await self._answer(self._cluster.Explain, request)

    async def ledger(self) -> cluster_pb2.GetLedgerResponse:
        return await self._answer(self._cluster.GetLedger, cluster_pb2.GetLedgerRequest(), self._token)

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers)
        return await self._answer(self._cluster.Scale, request, self._token)

    async def _answer(self, call: Callable[..., Awaitable[T]], request: Any, metadata: Any = None) -> T:
        try:
            return await call(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self.address, CALL_TIMEOUT_S) from error


class Client:
    """Use it in `with`, from any number of threads. Raises `CallFailed` for an address that is not host:port."""

    def __init__(self, address: str, credentials: Credentials = OPEN) -> None:
        self.address = _checked(address)
        tls, options = credentials.for_channel(), credentials.options()
        self._channel = (
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(address, tls, options=options)
        )
        self._token = credentials.metadata
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls in flight."""
        self._channel.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Stream the answer, as `AsyncClient` does. Leaving the loop early cancels the request on every worker."""
        call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        streaming = False
        try:
            for response in call:
                streaming = True
                yield response
        except grpc.RpcError as error:
            raise call_failed(error, self.address, timeout_s, streaming) from error
        finally:
            call.cancel()

    def model(self) -> inference_pb2.GetModelResponse:
        return self._answer(self._inference.GetModel, inference_pb2.GetModelRequest())

    def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        return self._answer(self._inference.Tokenize, request)

    def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        return self._answer(self._inference.Detokenize, request)

    def fleet(self) -> cluster_pb2.GetFleetResponse:
        return self._answer(self._cluster.GetFleet, cluster_pb2.GetFleetRequest())

    def explain(self, request: inference_pb2.GenerateRequest) -> cluster_pb2.ExplainResponse:
        return self._answer(self._cluster.Explain, request)

    def ledger(self) -> cluster_pb2.GetLedgerResponse:
        return self._answer(self._cluster.GetLedger, cluster_pb2.GetLedgerRequest(), self._token)

    def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers)
        return self._answer(self._cluster.Scale, request, self._token)

    def _answer(self, call: Callable[..., T], request: Any, metadata: Any = None) -> T:
        try:
            return call(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise call_failed(error, self.address, CALL_TIMEOUT_S) from error


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        message = f"router: must be host:port, is {address!r}"
        raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message, field="router")
    return address
