"""gRPC servers and channels with the same options everywhere, and the mapping of errors to statuses and back."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from core.errors import (
    ConfigError,
    DeadlineExceeded,
    ErrorCode,
    InvalidRequest,
    ModelNotFound,
    OutOfDeviceMemory,
    PermissionDenied,
    QueueFull,
    RequestCancelled,
    TandemError,
    TokenStreamEnded,
    TransferFailed,
    Unauthenticated,
    WorkerDrains,
    WorkerUnavailable,
)
from core.service import join_address
from runtime.rpc.api_keys import ApiKeys
from runtime.rpc.checked_handlers import CheckedHandlers, of_same_kind
from runtime.rpc.health import HEALTH_SERVICE, HealthServicer
from runtime.rpc.security import OPEN, Credentials, ServerRules, has_token, without_token

STATUS_OF: dict[ErrorCode, grpc.StatusCode] = {code: getattr(grpc.StatusCode, code.name) for code in ErrorCode}

_ERROR_OF: dict[grpc.StatusCode, Callable[[str], TandemError]] = {
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
}

FIELD_KEY, RETRYABLE_KEY, RETRY_AFTER_KEY = "tandem-field", "tandem-retryable", "tandem-retry-after-ms"
TRANSFER_KEY = "tandem-transfer-failed"  # a failed transfer has the same status as a lost worker
STREAM_KEY = "tandem-token-stream-ended"  # so has an ended token stream
DRAIN_KEY = "tandem-worker-drains"  # and a worker that drains
MEMORY_KEY = "tandem-out-of-device-memory"  # has the same status as a full queue
_ERROR_OF_KEY: dict[str, type[TandemError]] = {
    TRANSFER_KEY: TransferFailed,
    STREAM_KEY: TokenStreamEnded,
    DRAIN_KEY: WorkerDrains,
    MEMORY_KEY: OutOfDeviceMemory,
}

KEEPALIVE_TIME_S = 10.0  # a connection without traffic; beyond: gRPC sends a ping
KEEPALIVE_TIMEOUT_S = 5.0  # the answer to this ping; beyond: the connection breaks

# Calls that gRPC accepts before a servicer starts them. Above the limit (1,000 by default), gRPC cancels calls at
# random. With a high limit the router itself refuses calls, with RESOURCE_EXHAUSTED and a retry hint.
MAX_PENDING_CALLS = 20_000  # calls that the server has not started; beyond: gRPC cancels calls
# By default 30 s: a router that a burst keeps busy for longer would lose the calls at its end, without a retry hint.
MAX_PENDING_S = 3600  # a call that the server has not started; beyond: gRPC cancels it
ABORT_TIMEOUT_S = 2.0  # the status of a call behind messages that its client does not read; beyond: it stays there
WRITE_GRACE_S = 1.0  # after the deadline of a call, for the machine that ends it: a late write must not be faster
# Inside a cluster, because snapshots of large pools are long. The router accepts `max_message_bytes` from clients.
MAX_GRPC_MESSAGE_BYTES = 64 * 1024 * 1024  # a message between services; beyond: RESOURCE_EXHAUSTED


def _is_no_departure(record: logging.LogRecord) -> bool:
    """gRPC logs a traceback where a client leaves while its answer is sent. No client may fill a log."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_departure)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """The options of every channel and server. Keepalive detects a peer that vanished without closing a connection."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_TIME_S * 1e3)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1e3)),
        # gRPC also sends pings to measure bandwidth. While one of them waits, by default for 60 s, none is sent.
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1e3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_TIME_S * 1e3 / 2)),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
    ]


def open_channel(
    address: str, max_message_bytes: int, credentials: Credentials = OPEN, window_bytes: int = 0
) -> grpc.aio.Channel:
    """Uses TLS if `credentials` have a certificate. Each call carries the token itself, in `Credentials.metadata`.

    `window_bytes`: what a server may send on one call before this side reads; 0 = as much as gRPC finds useful.
    """
    options: list[tuple[str, int | str]] = [
        *channel_options(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel never reuses a broken connection
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),  # http_proxy is for other hosts than those of the fleet
    ]
    if window_bytes:
        options += [("grpc.http2.lookahead_bytes", window_bytes), ("grpc.http2.bdp_probe", 0)]
    tls = credentials.for_channel()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.aio.secure_channel(address, tls, options=options)


class ClusterTokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # a generic class in the stubs alone
    """Refuses calls of protected methods without the token of the cluster, before the request is read."""

    def __init__(self, token: str, protected: tuple[str, ...]) -> None:
        """`protected`: prefixes of full method names, e.g. "/tandem.v1.Worker/"."""
        self._token = token
        self._protected = protected

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._protected):
            return handler
        metadata = list(handler_call_details.invocation_metadata)
        return handler if has_token(metadata, self._token) else _refusing(handler, without_token(metadata))


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # a generic class in the stubs alone
    """Refuses calls without the API key that they need, before the request is read."""

    def __init__(self, keys: ApiKeys, on_refused: Callable[[TandemError], None]) -> None:
        self._keys = keys
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            self._keys.check(handler_call_details.method, handler_call_details.invocation_metadata or ())
        except TandemError as error:
            self._on_refused(error)
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: TandemError) -> Any:
    """A handler of the same kind that ends every call with `error`."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return of_same_kind(handler, refuse)


class GrpcServer:
    """A grpc.aio server with health and reflection services, which need no token."""

    def __init__(
        self,
        host: str,
        port: int,
        max_message_bytes: int,
        credentials: Credentials,
        rules: ServerRules,
        shares_port: bool = False,
    ) -> None:
        """`shares_port`: other servers may listen on the port, which is claimed (runtime/shared_port.py).

        `on_refused` may be set before `start`; it gets the error of each call that lacks its API key.
        """
        self.on_refused: Callable[[TandemError], None] = lambda _: None
        self._host, self._port = host, port
        self._tls = credentials.for_server(rules)
        interceptors: list[grpc.aio.ServerInterceptor[Any, Any]] = []
        if credentials.token:
            interceptors.append(ClusterTokenInterceptor(credentials.token, rules.protected))
        if rules.api_keys:
            keys = ApiKeys(rules.api_keys, credentials.token)
            interceptors.append(ApiKeyInterceptor(keys, lambda error: self.on_refused(error)))
        options = [*channel_options(max_message_bytes), ("grpc.so_reuseport", int(shares_port))]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._handlers: Any = CheckedHandlers(self._server, abort)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._handlers)
        self._names: list[str] = []
        self._stops: list[asyncio.Task[None]] = []  # a later one may have less grace

    def add(self, register: Callable[[Any, Any], None], servicer: object, full_name: str) -> None:
        """`register` is the generated function add_..._to_server; `full_name` is e.g. "tandem.v1.Inference"."""
        register(servicer, self._handlers)
        self._names.append(full_name)

    async def start(self) -> str:
        """Bind and serve. Returns host:port. Raises `ConfigError` if the address cannot be bound."""
        names = [*self._names, HEALTH_SERVICE, reflection.SERVICE_NAME]
        described = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # the stubs lack it
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, self._handlers)
        where = join_address(self._host, self._port)
        try:
            bound = (
                self._server.add_insecure_port(where)
                if self._tls is None
                else self._server.add_secure_port(where, self._tls)
            )
        except RuntimeError:
            bound = 0
        if bound == 0:
            why = "the port is taken, or this machine has no such address"
            raise ConfigError(f"cannot listen on {where}: {why if _has_descriptor() else 'no file descriptor is left'}")
        self.set_serving(True)
        await self._server.start()
        return join_address(self._host, bound)

    def set_serving(self, serving: bool) -> None:
        self._health.set(["", *self._names], serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel open calls after `grace_s`. If the caller is cancelled, the server stops on.

        Without a task of its own, gRPC would swallow one cancellation in twenty (`wait_for` of Python 3.11 does).
        """
        self._stops.append(asyncio.create_task(self._server.stop(grace_s)))
        await asyncio.shield(self._stops[-1])


def _has_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def trailers_of(error: TandemError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call that ends with `error`: field, retry hint and kind."""
    metadata: list[tuple[str, str]] = [(RETRYABLE_KEY, "true" if error.retryable else "false")]
    # The name may be a client's. gRPC would answer INTERNAL in place of the error, which has the name in its message.
    if error.field and error.field.isascii() and error.field.isprintable():
        metadata.append((FIELD_KEY, error.field))
    metadata += [(key, "true") for key, kind in _ERROR_OF_KEY.items() if isinstance(error, kind)]
    if isinstance(error, QueueFull):
        metadata.append((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))))
    return tuple(metadata)


class LocalContext:
    """The context of a call from this process, which no gRPC carries. `abort` raises the error itself."""

    def __init__(self, metadata: Sequence[tuple[str, str]], timeout_s: float | None = None) -> None:
        self._metadata, self._timeout_s = metadata, timeout_s

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return ""

    def time_remaining(self) -> float | None:
        return self._timeout_s


CallContext = grpc.aio.ServicerContext[Any, Any] | LocalContext
S = TypeVar("S")
M = TypeVar("M")
C = TypeVar("C", bound=CallContext)
T = TypeVar("T")


async def abort(context: CallContext, error: TandemError) -> NoReturn:
    """End the call with the status, field and retry hint of `error`.

    A status waits behind the messages that a client does not read. It stays there, and the call's handler ends. So it
    does if the call is over already, by its deadline or its client, and the handler has not been told yet.
    """
    if isinstance(context, LocalContext):
        raise error
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort(STATUS_OF[error.code], str(error), trailers_of(error))
    except (TimeoutError, grpc.aio.InternalError):
        # Every use of an aborted call raises the call's own AbortError, and gRPC wants no other exception.
        await context.send_initial_metadata(())
    raise AssertionError("an aborted call always raises")


def aborts(method: Callable[[S, M, C], Awaitable[T]]) -> Callable[[S, M, C], Coroutine[Any, Any, T]]:
    """For a method of a servicer: the call ends with the `TandemError` that it raises."""

    @functools.wraps(method)
    async def call(self: S, request: M, context: C) -> T:
        try:
            return await method(self, request, context)
        except TandemError as error:
            await abort(context, error)

    return call


def error_from(error: grpc.RpcError) -> TandemError:
    """The `TandemError` behind a failed call of a worker. Its text reaches clients, so it names no machine."""
    assert isinstance(error, grpc.aio.AioRpcError)
    details = error.details() or error.code().name
    pairs: Any = error.trailing_metadata() or ()  # the stubs declare another type
    trailers = dict(pairs)
    if RETRYABLE_KEY not in trailers:  # gRPC made the status: "... last error: UNKNOWN: ipv4:10.0.0.7:50051: ..."
        details = re.sub(r"\S{1,100}:\d{1,5}\b", "the worker", details)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        field = str(trailers.get(FIELD_KEY, "request"))
        return InvalidRequest(field, details.removeprefix(f"{field}: "))
    special = next((kind for key, kind in _ERROR_OF_KEY.items() if key in trailers), None)
    found = (special or _ERROR_OF.get(error.code(), TandemError))(details)
    if RETRYABLE_KEY in trailers:
        found.retryable = trailers[RETRYABLE_KEY] == "true"
    return found


def remaining_s(context: CallContext, default_s: float) -> float:
    """Seconds until the deadline of the call; `default_s` without a deadline."""
    remaining = context.time_remaining()
    return default_s if remaining is None else remaining


async def cancel_and_wait(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
