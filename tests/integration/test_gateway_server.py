"""The gateway as a program: routes about itself, limits, CORS, TLS, several models, processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from core.config import GatewayConfig, TandemConfig, TelemetryConfig
from core.errors import ConfigError
from gateway.errors import SERVER_STOPS
from gateway.fleets import Fleets
from gateway.server import HttpServer
from tests.support.certificates import Authority
from tests.support.command import PATIENCE_S, start
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway
from tests.support.scripted_router import ScriptedRouter, scripted_router
from tests.support.steps import slow_down
from tests.support.waiting import until

ASK = {"model": "fake:tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        yield deployment


@contextlib.asynccontextmanager
async def client_of(
    fleets: Fleets, config: GatewayConfig | None = None, **options: object
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_gateway(fleets, config) as url,
        httpx.AsyncClient(base_url=url, timeout=20, **options) as client,  # type: ignore[arg-type]
    ):
        yield client


async def test_it_tells_its_models_its_health_its_version_and_its_metrics(deployment: Deployment) -> None:
    async with client_of(Fleets([deployment.router.calls])) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("fake:tiny", "model", 8192)
        assert (await client.get("/v1/models/fake:tiny")).json() == model
        missing = await client.get("/v1/models/gpt-5")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"ready": True, "models": {"fake:tiny": "ready"}}
        assert (await client.get("/version")).json()["version"]
        home = await client.get("/")
        assert (home.status_code, home.headers["location"]) == (307, "/dashboard")
        page = (await client.get("/metrics")).text
        assert 'tandem_gateway_requests_total{route="/v1/models/{name:path}",status="404"} 1.0' in page
        assert "tandem_router_in_flight" in page, "the page of the router follows"


async def test_ready_tells_the_truth_while_workers_and_routers_go(deployment: Deployment) -> None:
    async with client_of(over_the_wire(deployment.router_address)) as client:
        await deployment.decode[0].stop()
        endpoint = deployment.endpoints[id(deployment.prefill[0])]
        await deployment.router.set_workers([endpoint])
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["models"]) == (503, {"fake:tiny": "no decode worker serves"})
        await deployment.router.stop()
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert "no router" in answer.json()["models"]["fake:tiny"]
        refused = await client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert deployment.router_address not in answer.text + refused.text, "no client learns where it is"
        assert (await client.get("/health")).status_code == 200


async def test_only_pages_of_the_configured_origins_may_call(deployment: Deployment) -> None:
    origin = "https://chat.example"
    async with client_of(Fleets([deployment.router.calls]), GatewayConfig(cors_origins=(origin,))) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await client.options("/v1/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == origin
        other = await client.options("/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        answer = await client.post("/v1/completions", json=ASK | {"model": "nope"}, headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, origin)
    async with client_of(Fleets([deployment.router.calls])) as client:
        answer = await client.get("/health", headers={"origin": origin})
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_with_a_certificate_it_serves_https_only(deployment: Deployment, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.sign("gateway")
    config = GatewayConfig(tls_cert=str(certificate), tls_key=str(key))
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    async with client_of(Fleets([deployment.router.calls]), config, verify=trust) as client:
        assert client.base_url.scheme == "https"
        assert (await client.get("/ready")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://127.0.0.1:{client.base_url.port}/health")


async def test_a_stop_lets_open_streams_end_and_takes_no_new_connection(deployment: Deployment) -> None:
    gate = contextlib.AsyncExitStack()
    url = await gate.enter_async_context(serving_gateway(Fleets([deployment.router.calls]), drain_timeout_s=60))
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        ask = ASK | {"stream": True, "max_tokens": 2000}
        async with client.stream("POST", "/v1/completions", json=ask) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            stopping = asyncio.create_task(gate.aclose())
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]", "the stream has ended as if nothing had happened"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_answers_that_the_drain_cuts_off_end_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], 0.05)
        gate = contextlib.AsyncExitStack()
        url = await gate.enter_async_context(serving_gateway(Fleets([deployment.router.calls]), drain_timeout_s=1))
        ask = ASK | {"max_tokens": 2000}
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=ask | {"stream": True}) as answer,
        ):
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            whole = asyncio.create_task(client.post("/v1/completions", json=ask))
            shell = deployment.router._shell
            await until(lambda: shell.num_open == 2, "both requests run", 20)
            stopping = asyncio.create_task(gate.aclose())
            *_, last = [line async for line in lines if line]
            refused = await whole
            await stopping
        assert refused.status_code == 503
        for error in (json.loads(last.removeprefix("data: "))["error"], refused.json()["error"]):
            assert (error["message"], error["code"]) == (SERVER_STOPS, "unavailable")
        assert "Traceback" not in caplog.text
        await deployment.settle()


async def test_a_second_ctrl_c_ends_the_command_before_its_open_streams() -> None:
    router = ScriptedRouter(["a"], hold=asyncio.Event())
    async with scripted_router([], router):
        gateway = await start("gateway", "--router", router.address, "--http", "0")
        assert gateway.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"serving" not in (line := await gateway.stdout.readline()):
                assert line, "the gateway did not start"
        url = line.decode().split(" at ")[1].split(";")[0]
        async with (
            httpx.AsyncClient(base_url=url, timeout=20) as client,
            client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer,
        ):
            lines = answer.aiter_lines()  # without a name, its end would close the connection
            assert (await anext(lines)).startswith("data: {")
            gateway.send_signal(signal.SIGINT)
            gateway.send_signal(signal.SIGTERM)
            begun_at = time.monotonic()
            out, err = await asyncio.wait_for(gateway.communicate(), PATIENCE_S)
        assert time.monotonic() - begun_at < TandemConfig().router.drain_timeout_s / 2
        assert (gateway.returncode, err) == (130, b"")
        assert b"draining; a second Ctrl-C stops at once" in out


async def test_a_least_interval_joins_tokens_into_fewer_events() -> None:
    num_events = {}
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], 0.03)
        for interval_ms in (0, 60_000):
            config = GatewayConfig(min_interval_ms=interval_ms)
            async with serving_gateway(Fleets([deployment.router.calls]), config) as url:
                body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
                async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
                    answer = await client.post("/v1/completions", json=body)
            num_events[interval_ms] = answer.text.count('"text": ')
    assert num_events[60_000] == 2  # the first token, and the others
    assert num_events[0] > 2


async def test_a_router_fails_with_its_http_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy(tiny_config()) as deployment:
        server = HttpServer(GatewayConfig(), TelemetryConfig(), Fleets([deployment.router.calls]))
        monkeypatch.setattr(deployment.router, "_front", server)
        await server.start()
        failed = asyncio.ensure_future(deployment.router.failed())

        async def fail(*_: object) -> bool:
            raise OSError("no descriptors")

        assert server._server is not None
        monkeypatch.setattr(server._server, "on_tick", fail)
        assert str(await asyncio.wait_for(failed, 10.0)) == "no descriptors"
        await server.stop()


async def test_an_address_that_the_machine_lacks_is_left_out_if_the_name_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where IPv6 is off, localhost may still be ::1 too."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    server = HttpServer(GatewayConfig(host="somewhere"), TelemetryConfig(), Fleets([]))
    with monkeypatch.context() as both:
        both.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        await server.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/health")).status_code == 200
    await server.stop()


async def test_an_address_of_a_family_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    server = HttpServer(GatewayConfig(host="::1"), TelemetryConfig(), Fleets([]))
    with monkeypatch.context() as without:
        without.setattr("gateway.server.socket.socket", Mock(side_effect=lacking))
        with pytest.raises(ConfigError, match=r"\[::1\]:\d+ \(Address family not supported"):
            await server.start()


def test_no_header_of_a_client_says_where_it_comes_from() -> None:
    """Bounds are counted by address; uvicorn would believe X-Forwarded-For of clients on this machine."""
    server = HttpServer(GatewayConfig(), TelemetryConfig(), Fleets([]))
    assert not server._options.proxy_headers
