"""Two clients with the same calls: `AsyncClient` for asyncio, `Client` for everything else.

Every call has a deadline, every failure is a `CallFailed`. The connection is made by the first call. `stream`,
`complete`, `model`, `tokenize` and `detokenize` are retried (tandem_client/retries.py); the other calls are not.
`metadata` of a call are headers, e.g. ("traceparent", ...) or ("authorization", "Bearer KEY").
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import grpc
import grpc.aio

from tandem_client.blocking import BLOCKING_CLOCK, BlockingChannel, finish, iterate
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

P = ParamSpec("P")
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
        self._connect(self._credentials.open_channel(grpc.aio, self.address))
        return self

    def _connect(self, channel: grpc.aio.Channel | BlockingChannel) -> None:
        self._channel = channel
        self._inference = inference_pb2_grpc.InferenceStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(channel)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight."""
        await self._channel.close(None)

    def stream(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Stream one answer as `Piece`s. Raises `TypeError` for an unknown option."""
        request = build_request(prompt, options)
        return AsyncStream(self._retrying.stream(lambda left_s: self.generate(request, left_s, metadata), timeout_s))

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
        except grpc.RpcError as error:
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

    async def events(self, limit: int = 0, after: int = 0, metadata: Metadata = ()) -> cluster_pb2.ListEventsResponse:
        """The newest notes about the fleet, oldest first: at most `limit` (0 = 100), numbered above `after`."""
        request = cluster_pb2.ListEventsRequest(limit=limit, after=after)
        return await self._operate(self._cluster.ListEvents, request, metadata)

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers)
        return await self._operate(self._cluster.Scale, request)

    async def roll(self, config: str = "", stop: bool = False) -> cluster_pb2.RollResponse:
        """Start every service again, with the config of the call if there is one, or stop that and restore the old."""
        return await self._operate(self._cluster.Roll, cluster_pb2.RollRequest(config=config, stop=stop))

    async def _ask(self, call: Callable[..., Awaitable[T]], request: Any, metadata: Metadata) -> T:
        headers = self._credentials.headers(metadata)
        return await self._retrying.answer(lambda left_s: self._answer(call, request, headers, left_s), CALL_TIMEOUT_S)

    async def _operate(self, call: Callable[..., Awaitable[T]], request: Any, metadata: Metadata = ()) -> T:
        """A call of an operator, with the token of the cluster."""
        return await self._answer(call, request, self._credentials.headers(metadata, operator=True), CALL_TIMEOUT_S)

    async def _answer(self, call: Callable[..., Awaitable[T]], request: Any, headers: Metadata, timeout_s: float) -> T:
        try:
            return await call(request, timeout=timeout_s, metadata=headers)
        except grpc.RpcError as error:
            raise call_failed(error, self.address, timeout_s) from error


def _blocking(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def blocking(self: Client, *args: P.args, **options: P.kwargs) -> T:
        return finish(call(self._client, *args, **options))

    return blocking


class Client:
    """Use it in `with`, from any number of threads. Raises `CallFailed` for an address that is not host:port."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = OPEN,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
        clock: Clock = BLOCKING_CLOCK,
    ) -> None:
        self._client = AsyncClient(address, credentials, retry, clock)
        self._client._connect(BlockingChannel(credentials.open_channel(grpc, address)))
        self.address = address

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls in flight."""
        finish(self._client.__aexit__(None, None, None))

    def stream(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Stream one answer as `Piece`s. Raises `TypeError` for an unknown option."""
        return Stream(self._client.stream(prompt, timeout_s, metadata, **options))

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> Generator[inference_pb2.GenerateResponse, None, None]:
        """Stream the messages of any request, with one attempt. Leaving the loop early cancels it on every worker."""
        return iterate(self._client.generate(request, timeout_s, metadata))

    complete = _blocking(AsyncClient.complete)
    model = _blocking(AsyncClient.model)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    fleet = _blocking(AsyncClient.fleet)
    explain = _blocking(AsyncClient.explain)
    list_requests = _blocking(AsyncClient.list_requests)
    get_trace = _blocking(AsyncClient.get_trace)
    metrics = _blocking(AsyncClient.metrics)
    ledger = _blocking(AsyncClient.ledger)
    events = _blocking(AsyncClient.events)
    scale = _blocking(AsyncClient.scale)
    roll = _blocking(AsyncClient.roll)


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        message = f"router: must be host:port, is {address!r}"
        raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message, field="router")
    return address
