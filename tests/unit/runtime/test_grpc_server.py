"""The behaviour of GrpcServer that differs from gRPC's defaults."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from runtime.rpc.grpc_server import GrpcServer
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
