"""Two clients with the same calls: `AsyncClient` for asyncio, `Client` for everything else.

Every call has a deadline, every failure is a `CallFailed`. The connection is made by the first call. `stream`,
`complete`, `model`, `tokenize` and `detokenize` are retried (tandem_client/retries.py); the other calls are not. An
answer whose router is lost goes on at another router (tandem_client/resuming.py): the next one of several addresses, or
the one that listens at the address then. `metadata` of a call are headers, e.g. ("traceparent", ...) or
("authorization", "Bearer KEY").
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import grpc
import grpc.aio

from tandem_client.blocking import BLOCKING_CLOCK, BlockingChannel, finish, iterate
from tandem_client.credentials import OPEN, Credentials, Metadata
from tandem_client.errors import CallFailed, call_failed
from tandem_client.prompts import Options, Prompt, build_request
from tandem_client.results import Completion
from tandem_client.retries import NO_RETRY, RESUME, SYSTEM_CLOCK, Clock, Retrying, RetryPolicy
from tandem_client.streams import AsyncStream, Stream
from tandem_client.stubs import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tandem_client.tracing import with_trace

CALL_TIMEOUT_S = 10.0
APPLY_TIMEOUT_S = 40.0  # the fleet loads the code that a config names
GENERATE_TIMEOUT_S = 300.0
LOST_S = 1.0  # for which other addresses come before a lost one

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Router:
    address: str
    lost_at: float = -math.inf
    channel: grpc.aio.Channel | BlockingChannel = field(init=False)
    inference: inference_pb2_grpc.InferenceStub = field(init=False)
    cluster: cluster_pb2_grpc.ClusterStub = field(init=False)

    def connect(self, channel: grpc.aio.Channel | BlockingChannel) -> None:
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(channel)


class AsyncClient:
    """Use it in `async with`, on one event loop. Raises `CallFailed` for an address that is not host:port.

    A call begins at the first of the addresses that was not lost within `LOST_S`. `retry` is for calls that have
    brought no token, `resume` for answers that have begun.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        credentials: Credentials = OPEN,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
        clock: Clock = SYSTEM_CLOCK,
        resume: RetryPolicy = RESUME,
    ) -> None:
        self._routers = [_Router(_dialled(each)) for each in ([address] if isinstance(address, str) else address)]
        self.address = ", ".join(router.address for router in self._routers)
        self._credentials, self._clock = credentials, clock
        self._retry, self._resume, self._retrying = retry, resume, Retrying(clock)

    async def __aenter__(self) -> AsyncClient:
        """Open the channels here, because a grpc.aio channel belongs to the running loop."""
        self._connect(lambda address: self._credentials.open_channel(grpc.aio, address))
        return self

    def _connect(self, open_channel: Callable[[str], grpc.aio.Channel | BlockingChannel]) -> None:
        for router in self._routers:
            router.connect(open_channel(router.address))

    def _router(self) -> _Router:
        """The router for the next call."""
        oldest_loss = self._clock.now() - LOST_S
        present = [router for router in self._routers if router.lost_at < oldest_loss]
        return present[0] if present else min(self._routers, key=lambda router: router.lost_at)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight."""
        for router in self._routers:
            await router.channel.close(None)

    def stream(
        self,
        prompt: Prompt,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Stream one answer as `Piece`s. Raises `TypeError` for an unknown option."""
        request = build_request(prompt, options)
        return AsyncStream(self._generate(request, timeout_s, metadata, lambda _: self._retry))

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

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Stream the messages of any request. Leaving the loop early cancels it on every worker.

        A refusal before the first token is not retried. A router that is lost is replaced by another one. A router
        that leaves may end the call and then reset the next connection, so each address is tried more than twice.
        """
        another = RetryPolicy(max_attempts=4 + len(self._routers))
        return self._generate(request, timeout_s, metadata, lambda error: another if error.lost else NO_RETRY)

    def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata,
        begin: Callable[[CallFailed], RetryPolicy],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        headers = self._credentials.headers(with_trace(metadata))

        def attempt(
            request: inference_pb2.GenerateRequest, left_s: float
        ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
            return self._attempt(request, left_s, timeout_s, headers)

        return self._retrying.stream(request, attempt, timeout_s, begin, self._resume)

    async def _attempt(
        self, request: inference_pb2.GenerateRequest, left_s: float, limit_s: float, headers: Metadata
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One call of one router, for the rest of the time limit."""
        router = self._router()
        call = router.inference.Generate(request, timeout=left_s, metadata=headers)
        streaming = False
        try:
            async for response in call:
                streaming = True
                yield response
        except grpc.RpcError as error:
            raise self._failed(error, router, limit_s, streaming) from error
        finally:
            call.cancel()

    def _failed(self, error: grpc.RpcError, router: _Router, limit_s: float, streaming: bool = False) -> CallFailed:
        failed = call_failed(error, router.address, limit_s, streaming)
        if failed.lost:
            router.lost_at = self._clock.now()
        return failed

    async def model(self, metadata: Metadata = ()) -> inference_pb2.GetModelResponse:
        return await self._ask("GetModel", inference_pb2.GetModelRequest(), metadata)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.TokenizeResponse:
        return await self._ask("Tokenize", request, metadata)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.DetokenizeResponse:
        return await self._ask("Detokenize", request, metadata)

    async def fleet(self, metadata: Metadata = ()) -> cluster_pb2.GetFleetResponse:
        return await self._operate("GetFleet", cluster_pb2.GetFleetRequest(), metadata)

    async def explain(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()
    ) -> cluster_pb2.ExplainResponse:
        return await self._operate("Explain", request, metadata)

    async def list_requests(
        self, limit: int = 0, after: int = 0, metadata: Metadata = ()
    ) -> cluster_pb2.ListRequestsResponse:
        """The requests that ended last, newest first: at most `limit` (0 = 100), with a higher number than `after`."""
        request = cluster_pb2.ListRequestsRequest(limit=limit, after=after)
        return await self._operate("ListRequests", request, metadata)

    async def get_trace(self, id: str, metadata: Metadata = ()) -> cluster_pb2.Trace:
        """The spans of one of them, by request id or trace id. Raises `CallFailed` with NOT_FOUND."""
        return await self._operate("GetTrace", cluster_pb2.GetTraceRequest(id=id), metadata)

    async def metrics(self, metadata: Metadata = ()) -> str:
        """The metrics page of the router that answers, in the text format of Prometheus."""
        return (await self._operate("GetMetrics", cluster_pb2.GetMetricsRequest(), metadata)).text

    async def ledger(self) -> cluster_pb2.GetLedgerResponse:
        return await self._operate("GetLedger", cluster_pb2.GetLedgerRequest())

    async def events(self, limit: int = 0, after: int = 0, metadata: Metadata = ()) -> cluster_pb2.ListEventsResponse:
        """The newest notes about the fleet, oldest first: at most `limit` (0 = 100), numbered above `after`."""
        request = cluster_pb2.ListEventsRequest(limit=limit, after=after)
        return await self._operate("ListEvents", request, metadata)

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, routers: int | None = None, auto: bool = False
    ) -> cluster_pb2.ScaleResponse:
        """Set the wanted sizes; None leaves a size as it is, and with `auto` leaves it to the planner."""
        request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, routers=routers, auto=auto)
        return await self._operate("Scale", request)

    async def switch_role(self, slot: str, role: cluster_pb2.ServiceRole) -> cluster_pb2.SwitchRoleResponse:
        """Begin to give the worker of a slot, such as "decode-1", the role of the other pool."""
        return await self._operate("SwitchRole", cluster_pb2.SwitchRoleRequest(slot=slot, role=role))

    async def config(self) -> cluster_pb2.GetConfigResponse:
        """The config of the fleet, as JSON."""
        return await self._operate("GetConfig", cluster_pb2.GetConfigRequest())

    async def apply(
        self,
        config: str = "",
        options: str = "",
        restart: bool = False,
        stop: bool = False,
        expected_revision: int = 0,
    ) -> cluster_pb2.ApplyResponse:
        """Give every service a whole config or other `options`, both as JSON, or start it again, or `stop` such a roll.

        Live options take effect while the fleet serves; for others the services start again, one at a time. A fleet
        whose config has another revision than `expected_revision` refuses the change; 0 = any.
        """
        request = cluster_pb2.ApplyRequest(
            config=config, options=options, restart=restart, stop=stop, expected_revision=expected_revision
        )
        return await self._operate("Apply", request, timeout_s=APPLY_TIMEOUT_S)

    async def _ask(self, method: str, request: Any, metadata: Metadata) -> Any:
        headers = self._credentials.headers(metadata)

        def ask(left_s: float) -> Awaitable[Any]:
            router = self._router()
            call = partial(getattr(router.inference, method), request, timeout=left_s, metadata=headers)
            return self._answer(router, call, CALL_TIMEOUT_S)

        return await self._retrying.answer(ask, CALL_TIMEOUT_S, self._retry)

    async def _operate(
        self, method: str, request: Any, metadata: Metadata = (), timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """A call of an operator, with the token of the cluster."""
        router, headers = self._router(), self._credentials.headers(metadata, operator=True)
        call = partial(getattr(router.cluster, method), request, timeout=timeout_s, metadata=headers)
        return await self._answer(router, call, timeout_s)

    async def _answer(self, router: _Router, call: Callable[[], Awaitable[T]], limit_s: float) -> T:
        try:
            return await call()
        except grpc.RpcError as error:
            raise self._failed(error, router, limit_s) from error


def _blocking(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def blocking(self: Client, *args: P.args, **options: P.kwargs) -> T:
        return finish(call(self._client, *args, **options))

    return blocking


class Client:
    """Use it in `with`, from any number of threads. The arguments are those of `AsyncClient`."""

    def __init__(
        self,
        address: str | Sequence[str],
        credentials: Credentials = OPEN,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
        clock: Clock = BLOCKING_CLOCK,
        resume: RetryPolicy = RESUME,
    ) -> None:
        self._client = AsyncClient(address, credentials, retry, clock, resume)
        self._client._connect(lambda each: BlockingChannel(credentials.open_channel(grpc, each)))
        self.address = self._client.address

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
        """Stream the messages of any request, as `AsyncClient.generate` does."""
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
    switch_role = _blocking(AsyncClient.switch_role)
    config = _blocking(AsyncClient.config)
    apply = _blocking(AsyncClient.apply)


def _dialled(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        message = f"router: must be host:port, with a port in [1, 65535], is {address!r}"
        raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message, field="router")
    return f"127.0.0.1:{port}" if host == "[::]" else address  # a machine without IPv6 serves [::], too
