"""The server's manners where they differ from gRPC's own."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ConfigError
from runtime.grpc_server import GrpcServer, open_channel
from runtime.security import OPEN, ServerRules

MESSAGE_BYTES = 1 << 20
BURST = 3000  # gRPC by itself would end hundreds of them as CANCELLED


def server_at(host: str) -> GrpcServer:
    return GrpcServer(host, 0, MESSAGE_BYTES, OPEN, ServerRules((), require_client_certs=False))


async def test_a_burst_of_calls_reaches_its_servicer_whole() -> None:
    server = server_at("127.0.0.1")
    channel = open_channel(await server.start(), MESSAGE_BYTES)
    check = health_pb2_grpc.HealthStub(channel).Check
    calls = [check(health_pb2.HealthCheckRequest()) for _ in range(BURST)]
    assert Counter(await asyncio.gather(*(call.code() for call in calls))) == {grpc.StatusCode.OK: BURST}
    await channel.close()
    await server.stop(0.0)


async def test_an_address_of_another_machine_is_said_to_be_none_of_this_one() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .* no such address"):
        await server_at("192.0.2.1").start()
