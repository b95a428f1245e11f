"""A host gives the supervisor an address that routers can dial, whatever address the worker listens on."""

from __future__ import annotations

import functools
import pickle

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.service_host import Placement, ServiceHost, reachable
from runtime.rpc.grpc_server import GrpcServer, open_channel
from runtime.rpc.security import OPEN, ServerRules

MESSAGE_BYTES = 1 << 20


def endpoint(address: str, role: ServiceRole = ServiceRole.DECODE) -> Endpoint:
    return Endpoint("decode-0.1", address, role)


@pytest.mark.parametrize(
    ("listening", "host", "dialled"),
    [
        ("0.0.0.0:7", "10.0.0.3", "10.0.0.3:7"),
        ("[::]:7", "10.0.0.3", "10.0.0.3:7"),
        ("[::]:7", "fd00::3", "[fd00::3]:7"),
        ("0.0.0.0:7", "", "127.0.0.1:7"),
        ("[::]:7", "", "[::1]:7"),
        ("10.0.0.3:7", "192.168.0.3", "10.0.0.3:7"),
        ("127.0.0.1:7", "", "127.0.0.1:7"),
    ],
)
def test_a_worker_on_every_address_is_dialled_at_its_machines_own(listening: str, host: str, dialled: str) -> None:
    assert reachable(endpoint(listening), host) == endpoint(dialled)


def test_a_routers_address_stays_as_the_operator_configured_it() -> None:
    router = endpoint("0.0.0.0:50051", ServiceRole.ROUTER)
    assert reachable(router, "10.0.0.3") == router


class Listening:
    """A worker that only listens."""

    def __init__(self, host: str, _: Placement) -> None:
        self._server = GrpcServer(host, 0, MESSAGE_BYTES, OPEN, ServerRules((), require_client_certs=False))

    async def start(self) -> Endpoint:
        return endpoint(await self._server.start())

    async def stop(self) -> None:
        await self._server.stop(0.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
async def test_the_address_that_a_host_gives_answers(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for effect in ("gc.disable", "gc.freeze", "sys.setswitchinterval"):
        monkeypatch.setattr(effect, lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the host sets it, the test puts it back
    service_host = ServiceHost()
    placement = Placement(ordinal=0, host="", address="", num_threads=1, control=None)
    found = await service_host.start(pickle.dumps(functools.partial(Listening, host)), placement)
    assert isinstance(found, Endpoint)
    assert found.address.rpartition(":")[0] in ("127.0.0.1", "[::1]")
    async with open_channel(found.address, MESSAGE_BYTES) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await service_host.stop()
