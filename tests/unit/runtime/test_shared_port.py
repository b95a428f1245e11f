"""A claimed port belongs to the claim and to servers that share it; every other claim fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ConfigError
from runtime.rpc.grpc_server import GrpcServer, open_channel
from runtime.rpc.security import OPEN, ServerRules
from runtime.shared_port import PortClaim

MESSAGE_BYTES = 1 << 20


@contextlib.contextmanager
def claimed(host: str = "127.0.0.1", port: int = 0) -> Iterator[PortClaim]:
    claim = PortClaim(host, port)
    try:
        yield claim
    finally:
        claim.close()


def server_on(port: int, shares_port: bool) -> GrpcServer:
    rules = ServerRules((), require_client_certs=False)
    return GrpcServer("127.0.0.1", port, MESSAGE_BYTES, OPEN, rules, shares_port)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(OSError, match="in use"):
        yield


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
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
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
        servers = [server_on(claim.port, shares_port=True) for _ in range(2)]
        for server in servers:
            assert await server.start() == claim.address
        await servers[1].set_serving(False)
        seen = await health_of_connections(claim.address, wanted=2)
        assert seen == {health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING}
        await asyncio.gather(*(server.stop(0.0) for server in servers))


async def test_a_server_that_does_not_share_its_port_cannot_start_beside_one_that_does() -> None:
    with claimed() as claim:
        server = server_on(claim.port, shares_port=True)
        await server.start()
        with pytest.raises(ConfigError, match="the port is taken"):
            await server_on(claim.port, shares_port=False).start()
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
