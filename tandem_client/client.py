"""Two clients with the same calls: `AsyncClient` for asyncio, `Client` for everything else.

Every call has a deadline, every failure is a `CallFailed`. The connection is made by the first call. `stream`,
`complete`, `model`, `tokenize` and `detokenize` are retried (tandem_client/retries.py); the other calls are not.
`metadata` of a call are headers, e.g. ("traceparent", ...) or ("authorization", "Bearer KEY").
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc
import grpc.aio

from tandem_client.credentials import OPEN, Credentials, Metadata
from tandem_client.errors import CallFailed, call_failed
from tandem_client.prompts import Options, Prompt, build_request
from tandem_client.results import Completion
from tandem_client.retries import SYSTEM_CLOCK, Clock, Retrying, RetryPolicy
from tandem_client.streams import AsyncStream, Stream
from tandem_client.stubs import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tandem_client.tracing import with_trace

CALL_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 300.0

T = TypeVar("T")


class AsyncClient:
    """Use it in `async with`, on one event loop. Raises `CallFailed` for an address that is not host:port."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = OPEN,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.address = _checked(address)
        self._credentials = credentials
        self._retrying = Retrying(retry, clock)

    async def __aenter__(self) -> AsyncClient:
        """Open the channel here, because a grpc.aio channel belongs to the running loop."""
        tls, options = self._credentials.for_channel(), self._credentials.options()
        self._channel = (
            grpc.aio.insecure_channel(self.address, options=options)
            if tls is None
            else grpc.aio.secure_channel(self.address, tls, options=options)
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight."""
        await self._channel.close(grace=None)

    def stream(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Stream one answer as `Piece`s. Raises `TypeError` for an unknown option."""
        request = build_request(prompt, options)
        return AsyncStream(
            self._retrying.stream_async(lambda left_s: self.generate(request, left_s, metadata), timeout_s)
        )

    async def complete(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Completion:
        """The whole answer. Raises `TypeError` for an unknown option."""
        async with self.stream(prompt, timeout_s, metadata, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Stream the messages of any request, with one attempt. Leaving the loop early cancels it on every worker."""
        headers = self._credentials.headers(with_trace(metadata))
        call = self._inference.Generate(request, timeout=timeout_s, metadata=headers)
        streaming = False
        try:
            async for response in call:
                streaming = True
                yield response
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self.address, timeout_s, streaming) from error
        finally:
            call.cancel()

    async def model(self, metadata: Metadata = ()) -> inference_pb2.GetModelResponse:
        return await self._ask(self._inference.GetModel, inference_pb2.GetModelRequest(), metadata)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.TokenizeResponse:
        return await self._ask(self._inference.Tokenize, request, metadata)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.DetokenizeResponse:
        return await self._ask(self._inference.Detokenize, request, metadata)

    async def fleet(self, metadata: Metadata = ()) -> cluster_pb2.GetFleetResponse:
        return await self._operate(self._cluster.GetFleet, cluster_pb2.GetFleetRequest(), metadata)

    async def explain(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()
    ) -> cluster_pb2.ExplainResponse:
        return await self._operate(self._cluster.Explain, request, metadata)

    async def list_requests(
        self, limit: int = 0, after: int = 0, metadata: Metadata = ()
    ) -> cluster_pb2.ListRequestsResponse:
        """The requests that ended last, newest first: at most `limit` (0 = 100), with a higher number than `after`."""
        request = cluster_pb2.ListRequestsRequest(limit=limit, after=after)
        return await self._operate(self._cluster.ListRequests, request, metadata)

    async def get_trace(self, id: str, metadata: Metadata = ()) -> cluster_pb2.Trace:
        """The spans of one of them, by request id or trace id. Raises `CallFailed` with NOT_FOUND."""
        return await self._operate(self._cluster.GetTrace, cluster_pb2.GetTraceRequest(id=id), metadata)

    async def metrics(self, metadata: Metadata = ()) -> str:
        """The metrics page of the router that answers, in the text format of Prometheus."""
        return (await self._operate(self._cluster.GetMetrics, cluster_pb2.GetMetricsRequest(), metadata)).text

    async def ledger(self) -> cluster_pb2.GetLedgerResponse:
        return await self._operate(self._cluster.GetLedger, cluster_pb2.GetLedgerRequest())

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers)
        return await self._operate(self._cluster.Scale, request)

    async def _ask(self, call: Callable[..., Awaitable[T]], request: Any, metadata: Metadata) -> T:
        headers = self._credentials.headers(metadata)
        return await self._retrying.answer_async(
            lambda left_s: self._answer(call, request, headers, left_s), CALL_TIMEOUT_S
        )

    async def _operate(self, call: Callable[..., Awaitable[T]], request: Any, metadata: Metadata = ()) -> T:
        """A call of an operator, with the token of the cluster."""
        return await self._answer(call, request, self._credentials.headers(metadata, operator=True), CALL_TIMEOUT_S)

    async def _answer(self, call: Callable[..., Awaitable[T]], request: Any, headers: Metadata, timeout_s: float) -> T:
        try:
            return await call(request, timeout=timeout_s, metadata=headers)
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self.address, timeout_s) from error


class Client:
    """Use it in `with`, from any number of threads. Raises `CallFailed` for an address that is not host:port."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = OPEN,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.address = _checked(address)
        self._credentials = credentials
        self._retrying = Retrying(retry, clock)
        tls, options = credentials.for_channel(), credentials.options()
        self._channel = (
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(address, tls, options=options)
        )
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

    def stream(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Stream one answer as `Piece`s. Raises `TypeError` for an unknown option."""
        request = build_request(prompt, options)
        return Stream(self._retrying.stream(lambda left_s: self.generate(request, left_s, metadata), timeout_s))

    def complete(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Completion:
        """The whole answer. Raises `TypeError` for an unknown option."""
        with self.stream(prompt, timeout_s, metadata, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> Generator[inference_pb2.GenerateResponse, None, None]:
        """Stream the messages of any request, with one attempt. Leaving the loop early cancels it on every worker."""
        call = self._inference.Generate(
            request, timeout=timeout_s, metadata=self._credentials.headers(with_trace(metadata))
        )
        streaming = False
        try:
            for response in call:
                streaming = True
                yield response
        except grpc.RpcError as error:
            raise call_failed(error, self.address, timeout_s, streaming) from error
        finally:
            call.cancel()

    def model(self, metadata: Metadata = ()) -> inference_pb2.GetModelResponse:
        return self._ask(self._inference.GetModel, inference_pb2.GetModelRequest(), metadata)

    def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.TokenizeResponse:
        return self._ask(self._inference.Tokenize, request, metadata)

    def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.DetokenizeResponse:
        return self._ask(self._inference.Detokenize, request, metadata)

    def fleet(self, metadata: Metadata = ()) -> cluster_pb2.GetFleetResponse:
        return self._operate(self._cluster.GetFleet, cluster_pb2.GetFleetRequest(), metadata)

    def explain(self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()) -> cluster_pb2.ExplainResponse:
        return self._operate(self._cluster.Explain, request, metadata)

    def list_requests(
        self, limit: int = 0, after: int = 0, metadata: Metadata = ()
    ) -> cluster_pb2.ListRequestsResponse:
        """The requests that ended last, newest first: at most `limit` (0 = 100), with a higher number than `after`."""
        request = cluster_pb2.ListRequestsRequest(limit=limit, after=after)
        return self._operate(self._cluster.ListRequests, request, metadata)

    def get_trace(self, id: str, metadata: Metadata = ()) -> cluster_pb2.Trace:
        """The spans of one of them, by request id or trace id. Raises `CallFailed` with NOT_FOUND."""
        return self._operate(self._cluster.GetTrace, cluster_pb2.GetTraceRequest(id=id), metadata)

    def metrics(self, metadata: Metadata = ()) -> str:
        """The metrics page of the router that answers, in the text format of Prometheus."""
        return self._operate(self._cluster.GetMetrics, cluster_pb2.GetMetricsRequest(), metadata).text

    def ledger(self) -> cluster_pb2.GetLedgerResponse:
        return self._operate(self._cluster.GetLedger, cluster_pb2.GetLedgerRequest())

    def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers)
        return self._operate(self._cluster.Scale, request)

    def _ask(self, call: Callable[..., T], request: Any, metadata: Metadata) -> T:
        headers = self._credentials.headers(metadata)
        return self._retrying.answer(lambda left_s: self._answer(call, request, headers, left_s), CALL_TIMEOUT_S)

    def _operate(self, call: Callable[..., T], request: Any, metadata: Metadata = ()) -> T:
        """A call of an operator, with the token of the cluster."""
        return self._answer(call, request, self._credentials.headers(metadata, operator=True), CALL_TIMEOUT_S)

    def _answer(self, call: Callable[..., T], request: Any, headers: Metadata, timeout_s: float) -> T:
        try:
            return call(request, timeout=timeout_s, metadata=headers)
        except grpc.RpcError as error:
            raise call_failed(error, self.address, timeout_s) from error


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        message = f"router: must be host:port, is {address!r}"
        raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message, field="router")
    return address
