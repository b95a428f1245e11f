"""gRPC manners: one way to start a server, open a channel, and turn errors into statuses and back."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import (
    ConfigError,
    DeadlineExceeded,
    ErrorCode,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    Unauthenticated,
    WorkerUnavailable,
)
from core.service import join_address
from runtime.security import OPEN, TOKEN_KEY, Credentials, ServerRules

STATUS_OF: dict[ErrorCode, grpc.StatusCode] = {code: getattr(grpc.StatusCode, code.name) for code in ErrorCode}

_ERROR_OF: dict[grpc.StatusCode, Callable[[str], TandemError]] = {
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
}

FIELD_KEY, RETRYABLE_KEY, RETRY_AFTER_KEY = "tandem-field", "tandem-retryable", "tandem-retry-after-ms"
TRANSFER_KEY = "tandem-transfer-failed"  # it shares its status with a lost worker, but not whom it blames


# Calls that have arrived and were not looked at yet. Beyond it (its own is 1,000) gRPC ends some at random,
# as CANCELLED, where the router would say RESOURCE_EXHAUSTED and when to come back: it shall have time for that.
MAX_PENDING_CALLS = 20_000
ABORT_TIMEOUT_S = 2.0
# Inside a cluster, for snapshots of large pools, and to a client of our own; what a router takes from others is
# `max_message_bytes` in its config.
MAX_GRPC_MESSAGE_BYTES = 64 * 1024 * 1024


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Keepalive finds a peer that vanished without a word; every channel and server uses the same."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a coin toss
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ]


def open_channel(address: str, max_message_bytes: int, credentials: Credentials = OPEN) -> grpc.aio.Channel:
    """TLS where `credentials` have a certificate. The token is for each call: `Credentials.metadata`."""
    options: list[tuple[str, int | str]] = [
        *channel_options(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),  # a restarted peer never inherits a broken connection
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    tls = credentials.for_channel()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.aio.secure_channel(address, tls, options=options)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls of the guarded methods that do not carry the cluster's token, before their request is read."""

    def __init__(self, token: str, guarded: tuple[str, ...]) -> None:
        """`guarded`: prefixes of full method names, e.g. "/tandem.v1.Worker/"."""
        self._token = token.encode()
        self._guarded = guarded

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._guarded):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata if key == TOKEN_KEY]
        if len(shown) == 1 and hmac.compare_digest(_as_bytes(shown[0]), self._token):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort(context, Unauthenticated("this call needs the cluster's token"))


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class GrpcServer:
    """A grpc.aio server with health and reflection, open to all, for the services it carries."""

    def __init__(
        self, host: str, port: int, max_message_bytes: int, credentials: Credentials, rules: ServerRules
    ) -> None:
        self._host, self._port = host, port
        self._tls = credentials.for_server(rules)
        guards = [TokenGuard(credentials.token, rules.guarded)] if credentials.token else []
        self._server = grpc.aio.server(interceptors=guards, options=channel_options(max_message_bytes))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []

    def add(self, register: Callable[[Any, Any], None], servicer: object, full_name: str) -> None:
        """`register` is the generated add_..._to_server; `full_name` e.g. "tandem.v1.Inference"."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> str:
        """Bind and serve. Returns host:port. Raises `ConfigError` where that cannot be."""
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
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
            raise ConfigError(f"cannot listen on {where}: the port is taken, or this machine has no such address")
        await self._server.start()
        await self.set_serving(True)
        return join_address(self._host, bound)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls; those in flight have `grace_s` to end."""
        await self._server.stop(grace_s)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """End the call with the status, field and retry hint of `error`.

    A status waits behind the messages that a client does not read. It stays there, and the call's handler ends.
    """
    metadata: list[tuple[str, str]] = [(RETRYABLE_KEY, "true" if error.retryable else "false")]
    if error.field:
        metadata.append((FIELD_KEY, error.field))
    if isinstance(error, TransferFailed):
        metadata.append((TRANSFER_KEY, "true"))
    if isinstance(error, QueueFull):
        metadata.append((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort(STATUS_OF[error.code], str(error), tuple(metadata))
    raise grpc.aio.AbortError


def error_from(error: grpc.RpcError) -> TandemError:
    """The `TandemError` behind a failed call."""
    assert isinstance(error, grpc.aio.AioRpcError)
    details = error.details() or error.code().name
    pairs: Any = error.trailing_metadata() or ()  # the stubs take it for pairs of something else
    trailers = dict(pairs)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        field = str(trailers.get(FIELD_KEY, "request"))
        return InvalidRequest(field, details.removeprefix(f"{field}: "))
    made = TransferFailed(details) if TRANSFER_KEY in trailers else _ERROR_OF.get(error.code(), TandemError)(details)
    if RETRYABLE_KEY in trailers:
        made.retryable = trailers[RETRYABLE_KEY] == "true"
    return made


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> float:
    """Seconds the caller will still wait."""
    remaining = context.time_remaining()
    return default_s if remaining is None else remaining


async def cancel_and_wait(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and let them end; what they raise now no longer matters to anyone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
