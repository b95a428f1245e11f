"""Without the cluster's credentials nobody gets anything from a worker, and nobody steers the cluster.

Real servers, real certificates. What must not leak is what a hand-off needs: the agent's address and the tickets.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, call

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.config import SecurityConfig, TandemConfig
from router.links import worker_link
from runtime.rpc.grpc_server import open_channel
from runtime.rpc.security import OPEN, TOKEN_KEY, Credentials, load_credentials
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.certificates import Authority
from tests.support.deployment import Deployment, deploy, make_request, tiny_config

TOKEN = "the-token-of-this-cluster"
TIMEOUT_S = 20.0  # for a busy machine; nothing here is to last so long
REFUSED = grpc.StatusCode.UNAUTHENTICATED
pytestmark = pytest.mark.asyncio(loop_scope="module")


def with_security(security: SecurityConfig) -> TandemConfig:
    return replace(tiny_config(), security=security)


@contextlib.asynccontextmanager
async def channel_to(address: str, credentials: Credentials = OPEN) -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(address, 1 << 20, credentials)
    try:
        yield channel
    finally:
        await channel.close(None)


def addresses(deployment: Deployment) -> dict[str, str]:
    """Of the two workers: role -> host:port."""
    return {
        "prefill": deployment.endpoints[id(deployment.prefill[0])].address,
        "decode": deployment.endpoints[id(deployment.decode[0])].address,
    }


async def status_of(call: Any) -> grpc.StatusCode:
    """How a call of either kind ends; of a stream, how its first message does."""
    try:
        if hasattr(call, "read"):
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def statuses_of_worker_calls(deployment: Deployment, metadata: list[tuple[str, str]]) -> set[grpc.StatusCode]:
    """Of a call of each service."""
    found, options = addresses(deployment), {"timeout": TIMEOUT_S, "metadata": metadata}
    async with channel_to(found["prefill"]) as prefill, channel_to(found["decode"]) as decode:
        calls = [
            *(
                worker_pb2_grpc.WorkerStub(each).Watch(worker_pb2.WatchRequest(), **options)
                for each in (prefill, decode)
            ),
            worker_pb2_grpc.PrefillWorkerStub(prefill).Prefill(worker_pb2.PrefillRequest(), **options),
            worker_pb2_grpc.DecodeWorkerStub(decode).Decode(worker_pb2.DecodeRequest(), **options),
        ]
        return {await status_of(call) for call in calls}


# ---- the token


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(with_security(SecurityConfig(cluster_token=TOKEN))) as deployment:
        yield deployment


async def test_a_worker_answers_no_call_without_the_token_and_the_router_has_it(deployment: Deployment) -> None:
    assert await statuses_of_worker_calls(deployment, []) == {REFUSED}
    statuses = await statuses_of_worker_calls(deployment, Credentials(TOKEN).metadata)
    assert statuses == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}  # the empty requests
    assert len((await deployment.generate(text="through both pools", max_tokens=3)).token_ids) == 3
    await deployment.settle()


async def test_a_router_with_another_token_never_learns_a_worker_s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    said = asyncio.Event()

    def hear(message: str, *_: object) -> None:
        if "different cluster tokens" in message:
            said.set()

    monkeypatch.setattr(worker_link.logger, "error", hear)
    async with deploy(with_security(SecurityConfig(cluster_token=TOKEN))) as theirs:
        worker = theirs.endpoints[id(theirs.prefill[0])]
        async with deploy(with_security(SecurityConfig(cluster_token="a-token-of-strangers")), 0, 0) as ours:
            await ours.router.set_workers([worker])
            async with asyncio.timeout(TIMEOUT_S):
                await said.wait()
            shell = ours.router._shell
            assert shell is not None
            assert list(shell.view.workers()) == []


async def test_the_public_api_and_health_need_no_token_but_steering_does(deployment: Deployment) -> None:
    for address in (*addresses(deployment).values(), deployment.router_address):
        async with channel_to(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await deployment.cluster.GetFleet(cluster_pb2.GetFleetRequest())
    for method, request in (
        ("Scale", cluster_pb2.ScaleRequest(decode=2)),
        ("Apply", cluster_pb2.ApplyRequest()),
        ("GetLedger", cluster_pb2.GetLedgerRequest()),
    ):
        call = getattr(deployment.cluster, method)
        assert await status_of(call(request, timeout=TIMEOUT_S)) is REFUSED, method
    # With the token it is refused for another reason: nobody supervises this fleet.
    with_token = deployment.cluster.Scale(cluster_pb2.ScaleRequest(decode=2), metadata=[(TOKEN_KEY, TOKEN)])
    assert await status_of(with_token) is grpc.StatusCode.UNAVAILABLE
    # The router has the token for its workers.
    ledgers = await deployment.cluster.GetLedger(cluster_pb2.GetLedgerRequest(), metadata=[(TOKEN_KEY, TOKEN)])
    assert [worker.error for worker in ledgers.workers] == ["", ""]


# ---- tickets


async def test_every_hand_off_has_a_ticket_of_128_random_bits(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers get it: tests/unit/router/test_requests.py."""
    draw = Mock(wraps=secrets.randbits)
    monkeypatch.setattr("router.shell.secrets.randbits", draw)
    for number in range(3):
        await deployment.generate(text=f"request {number} goes through both pools", max_tokens=2)
    assert draw.call_args_list == [call(128)] * 3


# ---- certificates


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "strangers")


async def watch_with(address: str, credentials: Credentials, *, show_certificate: bool = True) -> grpc.StatusCode:
    """Without a certificate of its own, the client trusts that of the authority."""
    tls = grpc.ssl_channel_credentials(credentials.ca)
    shown = channel_to(address, credentials) if show_certificate else grpc.aio.secure_channel(address, tls)
    async with shown as channel:
        request = worker_pb2.WatchRequest(router_id="stranger")
        stub = worker_pb2_grpc.WorkerStub(channel)
        return await status_of(stub.Watch(request, timeout=TIMEOUT_S, metadata=credentials.metadata))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls(ours: Authority) -> AsyncIterator[tuple[Deployment, SecurityConfig]]:
    security = ours.config("fleet", cluster_token=TOKEN)
    async with deploy(with_security(security)) as deployment:
        yield deployment, security


async def test_a_worker_answers_only_who_has_a_certificate_of_the_cluster(
    tls: tuple[Deployment, SecurityConfig], ours: Authority, strangers: Authority
) -> None:
    deployment, security = tls
    right = load_credentials(security)
    wrong = load_credentials(strangers.config("stranger", ca=ours.certificate, cluster_token=TOKEN))
    none = replace(right, cert=b"", key=b"", ca=right.ca)
    assert len((await deployment.generate(text="all of it over TLS", max_tokens=3)).token_ids) == 3
    for address in addresses(deployment).values():
        assert await watch_with(address, right) is grpc.StatusCode.OK
        assert await watch_with(address, replace(right, token="")) is REFUSED
        assert await watch_with(address, wrong) is grpc.StatusCode.UNAVAILABLE
        assert await watch_with(address, none) is grpc.StatusCode.UNAVAILABLE  # no TLS at all
        assert await watch_with(address, right, show_certificate=False) is grpc.StatusCode.UNAVAILABLE


async def test_the_public_api_asks_clients_for_a_certificate_where_the_config_says_so(
    tls: tuple[Deployment, SecurityConfig], ours: Authority
) -> None:
    async def generates(deployment: Deployment) -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes())
        async with grpc.aio.secure_channel(deployment.router_address, credentials) as channel:
            request = make_request(text="hi", max_tokens=2)
            return await status_of(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIMEOUT_S))

    assert await generates(tls[0]) is grpc.StatusCode.OK
    async with deploy(with_security(ours.config("asks", require_client_certs=True))) as asking:
        assert await generates(asking) is grpc.StatusCode.UNAVAILABLE
        assert len((await asking.generate(text="with one", max_tokens=2)).token_ids) == 2


async def test_a_router_hands_nothing_to_a_worker_whose_certificate_is_not_of_the_cluster(
    ours: Authority, strangers: Authority
) -> None:
    theirs = load_credentials(strangers.config("false-worker", cluster_token=TOKEN))
    seen: list[object] = []

    class FalseWorker(worker_pb2_grpc.WorkerServicer):
        async def Watch(self, request: object, context: object) -> None:
            seen.append((request, context))

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(FalseWorker(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(theirs.key, theirs.cert)]))
    await server.start()
    router = load_credentials(ours.config("router", cluster_token=TOKEN))
    assert await watch_with(f"127.0.0.1:{port}", router) is grpc.StatusCode.UNAVAILABLE
    assert seen == []
    assert await watch_with(f"127.0.0.1:{port}", theirs) is grpc.StatusCode.OK  # it would have listened
    await server.stop(0)


async def test_one_name_for_all_certificates_serves_where_addresses_are_not_known_beforehand(
    ours: Authority,
) -> None:
    certificate, key = ours.sign("shared", alternative_name="DNS:tandem.internal")
    security = SecurityConfig(tls_cert=str(certificate), tls_key=str(key), tls_ca=str(ours.certificate))
    nameless = load_credentials(security)
    named = load_credentials(replace(security, tls_server_name="tandem.internal"))
    async with deploy(with_security(replace(security, tls_server_name="tandem.internal"))) as deployment:
        address = addresses(deployment)["decode"]
        assert await watch_with(address, named) is grpc.StatusCode.OK
        assert await watch_with(address, nameless) is grpc.StatusCode.UNAVAILABLE


async def test_a_command_without_the_fleet_s_tls_says_what_may_be_missing(
    tls: tuple[Deployment, SecurityConfig],
) -> None:
    async with AsyncClient(tls[0].router_address) as client:
        with pytest.raises(CallFailed, match="its TLS settings differ from the client's"):
            await client.fleet()
