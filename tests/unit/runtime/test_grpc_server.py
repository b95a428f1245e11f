"""The server's manners where they differ from gRPC's own."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from runtime.grpc_server import GrpcServer
from runtime.security import OPEN, ServerRules

MESSAGE_BYTES = 1 << 20


def server_at(host: str) -> GrpcServer:
    return GrpcServer(host, 0, MESSAGE_BYTES, OPEN, ServerRules((), require_client_certs=False))


async def test_an_address_of_another_machine_is_said_to_be_none_of_this_one() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .* no such address"):
        await server_at("192.0.2.1").start()
