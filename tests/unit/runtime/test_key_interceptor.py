"""A server refuses calls of every kind without the key or the token that they need, before their handler runs.

The client here is a blocking one: where a server ends a call whose requests are still being sent, grpc.aio may report
INTERNAL in place of the server's status (grpc/grpc#36066).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.config import ApiKeyConfig
from core.errors import ErrorCode, TandemError
from runtime.rpc.api_keys import hash_of
from runtime.rpc.grpc_server import FIELD_KEY, RETRYABLE_KEY, ClusterTokenInterceptor, GrpcServer
from runtime.rpc.security import OPEN, TOKEN_KEY, ServerRules

KEY = "tandem-key-of-a-test"
TOKEN = "the-token-of-this-cluster"
SERVICE = "some.other.Protocol"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo:
    """One method of each kind; it answers with the last request."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def unary_unary(self, request: bytes, _: Any) -> bytes:
        self.num_calls += 1
        return request

    async def unary_stream(self, request: bytes, _: Any) -> AsyncIterator[bytes]:
        self.num_calls += 1
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], _: Any) -> bytes:
        self.num_calls += 1
        return [request async for request in requests][-1]

    async def stream_stream(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        self.num_calls += 1
        async for request in requests:
            yield request


def register(echo: Any, server: grpc.aio.Server) -> None:
    handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(echo, kind)) for kind in KINDS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def refusals() -> list[TandemError]:
    return []


@pytest_asyncio.fixture
async def channel(echo: Echo, refusals: list[TandemError]) -> AsyncIterator[grpc.Channel]:
    rules = ServerRules((), require_client_certs=False, api_keys=(ApiKeyConfig(name="test", sha256=hash_of(KEY)),))
    server = GrpcServer("127.0.0.1", 0, 1 << 20, OPEN, rules)
    server.on_refused = refusals.append
    server.add(register, echo, SERVICE)
    address = await server.start()
    with grpc.insecure_channel(address) as opened:
        yield opened
    await server.stop(0.0)


def answer(channel: grpc.Channel, kind: str, key: str) -> bytes:
    call = getattr(channel, kind)(f"/{SERVICE}/{kind}")
    request = iter([b"hello"]) if kind.startswith("stream") else b"hello"
    made = call(request, timeout=10.0, metadata=[("authorization", f"Bearer {key}")])
    return next(made) if kind.endswith("_stream") else made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_of_any_kind_needs_a_key(
    channel: grpc.Channel, echo: Echo, refusals: list[TandemError], kind: str
) -> None:
    assert await asyncio.to_thread(answer, channel, kind, KEY) == b"hello"
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(answer, channel, kind, "tandem-another-key")
    refused: Any = caught.value
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    pairs = refused.trailing_metadata()
    assert (dict(pairs)[RETRYABLE_KEY], FIELD_KEY in dict(pairs)) == ("false", False)
    assert (echo.num_calls, [error.code for error in refusals]) == (1, [ErrorCode.UNAUTHENTICATED])


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        ([TOKEN], True), ([TOKEN.encode()], True), ([], False), ([""], False), (["another-token-altogether"], False),
        ([TOKEN[:-1]], False), ([TOKEN + "x"], False), ([TOKEN, TOKEN], False),
    ],
)  # fmt: skip
async def test_a_protected_method_needs_exactly_the_token(tokens: list[str | bytes], accepted: bool) -> None:
    interceptor = ClusterTokenInterceptor(TOKEN, ("/protected/",))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)

    async def continuation(_: object) -> Any:
        return handler

    for method, passes in (("/protected/Call", accepted), ("/open/Call", True)):
        details: Any = SimpleNamespace(method=method, invocation_metadata=[(TOKEN_KEY, token) for token in tokens])
        assert (await interceptor.intercept_service(continuation, details) is handler) is passes
