"""The behaviour of GrpcServer that differs from gRPC's defaults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.config import ApiKeyConfig
from core.errors import ConfigError, DeadlineExceeded, ErrorCode, TandemError, WorkerUnavailable
from runtime.rpc import call_limits
from runtime.rpc.api_keys import hash_of
from runtime.rpc.grpc_server import (
    FIELD_KEY,
    RETRYABLE_KEY,
    ClusterTokenInterceptor,
    GrpcServer,
    abort,
    error_from,
    open_channel,
)
from runtime.rpc.security import OPEN, TOKEN_KEY, ServerRules
from runtime.shared_port import PortClaim
from tests.support.limits import no_more_descriptors

MESSAGE_BYTES = 1 << 20
SERVICE = "some.other.Protocol"
SERVING = health_pb2.HealthCheckResponse.SERVING


def server_at(host: str, port: int = 0, shares_port: bool = False, keys: tuple[ApiKeyConfig, ...] = ()) -> GrpcServer:
    rules = ServerRules((), require_client_certs=False, api_keys=keys)
    return GrpcServer(host, port, MESSAGE_BYTES, OPEN, rules, shares_port)


@contextlib.asynccontextmanager
async def serving(handlers: dict[str, Any], server: GrpcServer | None = None) -> AsyncIterator[str]:
    """The address of a server with these methods of `SERVICE`."""

    def register(_: Any, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    server = server or server_at("127.0.0.1")
    server.add(register, None, SERVICE)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


async def test_the_error_for_an_address_of_another_machine_says_that_this_machine_lacks_it() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .* no such address"):
        await server_at("192.0.2.1").start()


async def test_the_error_without_file_descriptors_says_so() -> None:
    server = server_at("127.0.0.1")
    with no_more_descriptors(), pytest.raises(ConfigError, match=r"cannot listen on .*: no file descriptor is left"):
        await server.start()


async def test_an_abort_of_a_call_that_is_over_ends_its_handler_as_any_other_abort() -> None:
    raised: list[type[BaseException]] = []

    async def late(_: Any, context: Any) -> None:
        time.sleep(context.time_remaining() + 0.5)  # noqa: ASYNC251  no other task learns of the client's deadline
        try:
            await abort(context, DeadlineExceeded("too late"))
        except BaseException as error:
            raised.append(type(error))
            raise

    def call(address: str) -> grpc.StatusCode:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60.0)  # the call is to reach its handler in time
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary(f"/{SERVICE}/late", None, None)(b"", timeout=3.0)
        return failed.value.code()  # type: ignore[attr-defined, no-any-return]

    async with serving({"late": grpc.unary_unary_rpc_method_handler(late)}) as address:
        assert await asyncio.to_thread(call, address) is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30.0):
            while not raised:
                await asyncio.sleep(0.01)
    assert raised == [grpc.aio.AbortError]


@pytest.mark.parametrize(
    "details",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: Failed to connect to remote "
        "host: Connection refused",
        "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5Bfd00::10.0.0.7%5D:50051: Socket closed",
        "errors resolving 10.0.0.7.example:50051: [field:hostname lookup error:address lookup failed for "
        "10.0.0.7.example:50051: Domain name not found]",
    ],
)
def test_the_error_of_a_worker_out_of_reach_names_no_machine(details: str) -> None:
    none = grpc.aio.Metadata()
    error = error_from(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details, None))
    assert isinstance(error, WorkerUnavailable)
    assert "10.0.0.7" not in str(error)
    assert "the worker: " in str(error)
    assert details.split(": ")[-1] in str(error), "what gRPC says of it remains"


def test_a_client_that_leaves_while_its_answer_is_sent_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It needs a moment between two turns of gRPC's loop: two of 80,000 odd messages met it."""
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.error("ExecuteBatchError raised in core by servicer method [/tandem.v1.DecodeWorker/Decode]")
    logger.error("another error")
    assert caplog.messages == ["another error"]


async def test_a_cancelled_stop_is_cancelled_and_the_server_stops_nevertheless() -> None:
    """gRPC's own stop swallows about one in twenty of these cancellations."""
    for turns in range(100):
        server = server_at("127.0.0.1")
        await server.start()
        stopping = asyncio.create_task(server.stop(0.5))
        for _ in range(1 + turns % 25):
            await asyncio.sleep(0)
        if stopping.cancel():
            with pytest.raises(asyncio.CancelledError):
                await stopping
        await server.stop(0.5)


# ---- A server refuses calls of every kind without the key or the token that they need, before their handler runs.
# The client is a blocking one: where a server ends a call whose requests are still being sent, grpc.aio may report
# INTERNAL in place of the server's status (grpc/grpc#36066).

KEY = "tandem-key-of-a-test"
TOKEN = "the-token-of-this-cluster"
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


def handlers_of(echo: Echo, **codec: Any) -> dict[str, Any]:
    return {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(echo, kind), **codec) for kind in KINDS}


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def refusals() -> list[TandemError]:
    return []


@pytest_asyncio.fixture
async def channel(echo: Echo, refusals: list[TandemError]) -> AsyncIterator[grpc.Channel]:
    server = server_at("127.0.0.1", keys=(ApiKeyConfig(name="test", sha256=hash_of(KEY)),))
    server.on_refused = refusals.append
    async with serving(handlers_of(echo), server) as address:
        with grpc.insecure_channel(address) as opened:
            yield opened


def answer(channel: grpc.Channel, kind: str, message: bytes, key: str = KEY) -> bytes:
    call = getattr(channel, kind)(f"/{SERVICE}/{kind}")
    request = iter([message]) if kind.startswith("stream") else message
    made = call(request, timeout=10.0, metadata=[("authorization", f"Bearer {key}")])
    return next(made) if kind.endswith("_stream") else made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_of_any_kind_needs_a_key(
    channel: grpc.Channel, echo: Echo, refusals: list[TandemError], kind: str
) -> None:
    assert await asyncio.to_thread(answer, channel, kind, b"hello") == b"hello"
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(answer, channel, kind, b"hello", "tandem-another-key")
    refused: Any = caught.value
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    pairs = refused.trailing_metadata()
    assert (dict(pairs)[RETRYABLE_KEY], FIELD_KEY in dict(pairs)) == ("false", False)
    assert (echo.num_calls, [error.code for error in refusals]) == (1, [ErrorCode.UNAUTHENTICATED])


async def test_open_calls_are_bounded_one_that_ends_makes_room_and_health_checks_have_a_limit_of_their_own(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "MAX_OPEN_CALLS", 2)
    async with serving(handlers_of(echo)) as address, grpc.aio.insecure_channel(address) as opened:
        channel: Any = opened  # the stubs want serializers
        make = channel.stream_stream(f"/{SERVICE}/stream_stream")
        first, second = make(), make()
        for call in (first, second):
            await call.write(b"hello")
            assert await call.read() == b"hello"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{SERVICE}/unary_unary")(b"hello")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with raw_call(address, f"/{SERVICE}/unary_unary") as reader:
            assert b"grpc-status\x018" in await reader.readuntil(b"too many open calls"), "without its message"
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        monkeypatch.setattr(call_limits, "MAX_HEALTH_CHECKS", 0)
        first.cancel()
        async with asyncio.timeout(30.0):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await channel.unary_unary(f"/{SERVICE}/unary_unary")(b"hello") == b"hello"
                    break
        with pytest.raises(grpc.aio.AioRpcError, match="too many open calls"):
            await health.Check(health_pb2.HealthCheckRequest())


async def test_a_client_that_reads_no_status_delays_no_drain(echo: Echo) -> None:
    server = server_at("127.0.0.1")
    async with (
        serving(handlers_of(echo), server) as address,
        raw_call(address, "/grpc.health.v1.Health/Watch", message=b"\0\0\0\0\0", window=0) as unread,
        grpc.aio.insecure_channel(address) as channel,
    ):
        await unread.readuntil(b"application/grpc")  # its answer has begun
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30.0)
        assert (await watched.read()).status == SERVING
        server.set_serving(False)
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(TimeoutError):  # gRPC closes this connection 5 s later, because it answers no ping
            await asyncio.wait_for(unread.read(), 0.01)


@contextlib.asynccontextmanager
async def raw_call(
    address: str, method: str, message: bytes | None = None, window: int = 65_535
) -> AsyncIterator[asyncio.StreamReader]:
    """A call in frames of HTTP/2, whose client takes `window` bytes; without a message, its server waits for one."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    fields = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x"), ("te", "trailers"),
              ("content-type", "application/grpc")]  # fmt: skip
    headers = b"".join(b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in pair) for pair in fields)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, window)))
    writer.write(frame(1, 4, 1, headers) + (b"" if message is None else frame(0, 1, 1, message)))
    try:
        async with asyncio.timeout(30.0):
            yield reader
    finally:
        writer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_that_cannot_be_decoded_has_an_error_with_a_type_and_no_line_of_the_log(
    kind: str, echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    message = health_pb2.HealthCheckRequest
    good = message(service="a").SerializeToString()

    def compare(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            assert answer(channel, kind, good) == good
            for odd in (b"\xff", b"\x0a\x01\xff"):
                with pytest.raises(grpc.RpcError, match=r"request: Error parsing message with type 'grpc") as caught:
                    answer(channel, kind, odd)
                refused: Any = caught.value
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert dict(refused.trailing_metadata())[FIELD_KEY] == "request"

    decoding = handlers_of(echo, request_deserializer=message.FromString, response_serializer=message.SerializeToString)
    async with serving(decoding) as address:
        await asyncio.to_thread(compare, address)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    # gRPC has one poller for all loops of a process, whose turn another loop may have taken.
    assert not [text for text in warnings if "PollerCompletionQueue" not in text]


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


# ---- A claimed port belongs to the claim and to servers that share it; every other claim fails.


def claimed(host: str = "127.0.0.1", port: int = 0) -> contextlib.closing[PortClaim]:
    return contextlib.closing(PortClaim(host, port))


def refused() -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, match="in use")


def test_a_claimed_port_cannot_be_claimed_again_until_the_claim_ends() -> None:
    with claimed() as claim, refused():
        PortClaim("127.0.0.1", claim.port)
    with claimed(port=claim.port) as again, refused():
        PortClaim("127.0.0.1", again.port)


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_on_which_another_program_listens_cannot_be_claimed(option: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with refused():
            PortClaim("127.0.0.1", other.getsockname()[1])


def test_a_program_that_does_not_share_ports_cannot_listen_on_a_claimed_one() -> None:
    with claimed() as claim, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with refused():
            other.bind(("127.0.0.1", claim.port))


@pytest.mark.parametrize("repetition", range(20))
def test_of_many_claims_at_the_same_time_one_succeeds(repetition: int) -> None:
    del repetition
    with claimed() as free:
        port = free.port
    barrier, claims = threading.Barrier(8), []

    def claim() -> None:
        barrier.wait()
        with contextlib.suppress(OSError):
            claims.append(PortClaim("127.0.0.1", port))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for winner in claims:
        winner.close()
    assert len(claims) == 1


def test_connections_of_an_earlier_server_do_not_keep_the_port_from_being_claimed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = server.accept()
            connection.close()  # the side that closes first keeps the connection in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as plain, refused():
        plain.bind(("127.0.0.1", port))
    with claimed(port=port):
        pass


def test_a_name_with_several_addresses_is_claimed_at_each_of_them() -> None:
    hosts = {str(found[4][0]) for found in socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)}
    with claimed("localhost") as claim:
        assert claim.address == f"localhost:{claim.port}"
        for host in filter(has_address, hosts):
            with refused():
                PortClaim(host, claim.port)


def has_address(host: str) -> bool:
    """Whether this machine has the address."""
    try:
        PortClaim(host, 0).close()
    except OSError:
        return False
    return True


async def test_several_servers_share_a_claimed_port_and_the_claim_takes_no_connection() -> None:
    with claimed() as claim:
        servers = [server_at("127.0.0.1", claim.port, shares_port=True) for _ in range(2)]
        for server in servers:
            assert await server.start() == claim.address
        servers[1].set_serving(False)
        seen = await health_of_connections(claim.address, wanted=2)
        assert seen == {health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING}
        await asyncio.gather(*(server.stop(0.0) for server in servers))


async def test_a_server_that_does_not_share_its_port_cannot_start_beside_one_that_does() -> None:
    with claimed() as claim:
        server = server_at("127.0.0.1", claim.port, shares_port=True)
        await server.start()
        with pytest.raises(ConfigError, match="the port is taken"):
            await server_at("127.0.0.1", claim.port).start()
        await server.stop(0.0)


async def health_of_connections(address: str, wanted: int) -> set[int]:
    """Statuses seen over new connections, until so many different ones were seen."""
    seen: set[int] = set()
    async with asyncio.timeout(20):
        while len(seen) < wanted:
            channel: grpc.aio.Channel
            async with open_channel(address, MESSAGE_BYTES) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())  # type: ignore[no-untyped-call]
                seen.add(answer.status)
    return seen
