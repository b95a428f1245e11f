"""The behaviour of GrpcServer that differs from gRPC's defaults."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from core.errors import ConfigError, DeadlineExceeded
from runtime.rpc.grpc_server import GrpcServer, abort
from runtime.rpc.security import OPEN, ServerRules
from tests.support.limits import no_more_descriptors

MESSAGE_BYTES = 1 << 20


def server_at(host: str) -> GrpcServer:
    return GrpcServer(host, 0, MESSAGE_BYTES, OPEN, ServerRules((), require_client_certs=False))


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
        time.sleep(1.5)  # noqa: ASYNC251  no other task learns of the client's deadline
        try:
            await abort(context, DeadlineExceeded("too late"))
        except BaseException as error:
            raised.append(type(error))
            raise

    def call(address: str) -> grpc.StatusCode:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60.0)  # the call is to reach its handler in time
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary("/a.Service/late", None, None)(b"", timeout=1.0)
        return failed.value.code()  # type: ignore[attr-defined, no-any-return]

    def register(_: Any, server: grpc.aio.Server) -> None:
        handlers = {"late": grpc.unary_unary_rpc_method_handler(late)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))

    server = server_at("127.0.0.1")
    server.add(register, None, "a.Service")
    address = await server.start()
    try:
        assert await asyncio.to_thread(call, address) is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30.0):
            while not raised:
                await asyncio.sleep(0.01)
    finally:
        await server.stop(0.0)
    assert raised == [grpc.aio.AbortError]


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
