"""Small commands: `key`, `role`, `gateway`, the notices of `serve`, and a router over the wire."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import signal
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from rich.console import Console

from cli import gateway
from cli.commands import role as role_command
from cli.commands import status
from cli.commands.calibrate import calibrate
from cli.commands.calibration_load import LoadPlan
from cli.commands.key import print_new_key
from cli.commands.serve import print_notices, wait_for_workers
from cli.remote_router import RemoteRouter, tandem_error
from core.config import TandemConfig, from_mapping
from core.errors import ConfigError, TandemError, Unauthenticated, WorkerUnavailable
from core.fleet_control import SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.service import Metadata
from fleet.law.events import FleetFailed, FleetMessage
from protos.fleet_codec import encode_slot
from runtime.rpc.api_keys import ApiKeys
from tandem_client import CallFailed, Credentials
from tandem_client.errors import call_failed
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2
from tests.unit.cli.conftest import connection_to

# ---- tandem key


def printed(name: str, tenant: str = "") -> str:
    output = io.StringIO()
    print_new_key(name, tenant, Console(file=output, width=40))
    return output.getvalue()


@pytest.mark.parametrize(("name", "tenant"), [("alice", ""), ('al"ice\\', "a [b] team"), ("ålice", "é")])
def test_the_printed_lines_admit_the_printed_key(name: str, tenant: str) -> None:
    text = printed(name, tenant)
    (key,) = re.findall(r"shown only now: (tandem-\S+)", text)
    config = from_mapping(tomllib.loads(text))
    found: Any = ApiKeys(config.api_keys).find([("authorization", f"Bearer {key}")])
    assert (found.name, found.effective_tenant) == (name, tenant or name)
    assert text.count(key) == 1


# ---- tandem role


P = ServiceRole.PREFILL
AWAY = CallFailed(grpc.StatusCode.UNAVAILABLE, "no router", retryable=True)


async def switch(monkeypatch: pytest.MonkeyPatch, *states: SlotStatus | CallFailed | None) -> str:
    """At a router whose fleet shows the next state of decode-1 at each call, or fails; None = without the slot."""
    monkeypatch.setattr(role_command, "REFRESH_S", 0.0)
    router, out = Mock(), io.StringIO()
    router.switch_role = AsyncMock(return_value=cluster_pb2.SwitchRoleResponse(wanted_prefill=2, wanted_decode=1))
    router.fleet = AsyncMock(side_effect=[fleet_with(state) for state in states])
    await role_command.switch_role(connection_to(router), "decode-1", "prefill", Console(file=out))
    router.switch_role.assert_awaited_once_with("decode-1", cluster_pb2.SERVICE_ROLE_PREFILL)
    return out.getvalue()


def fleet_with(state: SlotStatus | CallFailed | None) -> cluster_pb2.GetFleetResponse | CallFailed:
    if isinstance(state, CallFailed):
        return state
    return cluster_pb2.GetFleetResponse(slots=[] if state is None else [encode_slot(state)])


def decode_1(state: SlotState, role: ServiceRole = P, reason: str = "") -> SlotStatus:
    return SlotStatus("decode-1", role, state, 0.1, reason)


async def test_the_command_ends_when_the_worker_serves_in_its_new_role(monkeypatch: pytest.MonkeyPatch) -> None:
    switching = decode_1(SlotState.SWITCHING)
    said = await switch(monkeypatch, switching, AWAY, switching, AWAY, decode_1(SlotState.SERVING))
    assert said == "decode-1 serves as prefill worker; wanted: 2 prefill, 1 decode\n"


async def test_a_wait_for_workers_outlasts_a_router_that_is_replaced() -> None:
    worker = cluster_pb2.FleetWorker(role=worker_pb2.WORKER_ROLE_DECODE, state=worker_pb2.WORKER_STATE_SERVING)
    client: Any = Mock()
    client.fleet = AsyncMock(side_effect=[AWAY, cluster_pb2.GetFleetResponse(wanted_decode=1, workers=[worker])])
    await wait_for_workers(client, 10.0)
    client.fleet = AsyncMock(side_effect=CallFailed(grpc.StatusCode.UNAUTHENTICATED, "wrong token"))
    with pytest.raises(CallFailed, match="wrong token"):
        await wait_for_workers(client, 10.0)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            decode_1(SlotState.WAITING, reason="did not switch: still has work"),
            "waiting: did not switch: still has work",
        ),
        (decode_1(SlotState.DRAINING, ServiceRole.DECODE, "its machine leaves"), "draining: its machine leaves"),
        (None, "gone"),
    ],
)
async def test_the_command_fails_with_the_state_of_a_worker_that_does_not(
    monkeypatch: pytest.MonkeyPatch, after: SlotStatus | None, said: str
) -> None:
    with pytest.raises(WorkerUnavailable) as failed:
        await switch(monkeypatch, decode_1(SlotState.SWITCHING), after)
    assert str(failed.value) == f"decode-1 does not serve as prefill worker, it is {said}"


# ---- tandem gateway


class EndingServer:
    fleets, url = SimpleNamespace(fleets=()), "http://127.0.0.1:1"

    async def start(self) -> None:
        self.made = [object()]

    async def failed(self) -> str:
        self.is_collected = any(each is self.made for each in gc.get_objects())
        return "it ends"

    async def drain(self, _: float) -> None:
        pass


def test_collections_skip_the_objects_that_the_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    server, config = EndingServer(), TandemConfig()
    monkeypatch.setattr(gateway, "_server", lambda _, __: server)
    try:
        with pytest.raises(TandemError, match="it ends"):
            gateway.serve_gateway(replace(config, gateway=replace(config.gateway, port=0)), [])
    finally:
        gc.unfreeze()
    assert not server.is_collected


class InterruptedServer(EndingServer):
    """Its start is interrupted."""

    has_started = has_drained = False

    async def start(self) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        self.has_started = True

    async def drain(self, _: float) -> None:
        self.has_drained = self.has_started


def test_ctrl_c_during_the_start_of_the_gateway_drains_what_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    server, config = InterruptedServer(), TandemConfig()
    monkeypatch.setattr(gateway, "_server", lambda _, __: server)
    with open("/dev/full", "w") as full:  # no line of the gateway can be written
        monkeypatch.setattr(sys, "stdout", full)
        gateway.serve_gateway(replace(config, gateway=replace(config.gateway, port=0)), [])
        monkeypatch.undo()
    assert server.has_drained


# ---- tandem serve


async def test_a_supervisor_that_fails_ends_the_command() -> None:
    """Nothing else would: requests go on while no worker is started again."""
    printed: list[str] = []
    updates = [FleetMessage("decode-0", "serves")], [FleetFailed("the supervisor has a bug")]
    cluster = Mock(updates=AsyncMock(side_effect=updates))
    with pytest.raises(TandemError, match="the supervisor has a bug"):
        await print_notices(cluster, printed.append)
    assert printed == ["decode-0 serves"]


# ---- commands that ask a fleet more than once


async def test_a_table_is_shown_after_a_question_that_no_router_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    router, out, fleet = Mock(), io.StringIO(), cluster_pb2.GetFleetResponse(wanted_decode=7)
    router.fleet = AsyncMock(side_effect=[fleet, AWAY, fleet])
    await status.status(connection_to(router), Console(file=out), once=True, with_ledger=False)
    assert "decode 0/7" in out.getvalue()


async def test_a_live_table_says_when_no_router_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    router, out, fleet = Mock(), io.StringIO(), cluster_pb2.GetFleetResponse()
    console = Console(file=out, force_terminal=True)
    refused = CallFailed(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
    router.fleet = AsyncMock(side_effect=[fleet, AWAY, fleet, refused])
    with pytest.raises(CallFailed, match="wrong token"):
        await status.status(connection_to(router), console, once=False, with_ledger=False)
    assert out.getvalue().count("no router answers now") == 1
    assert router.fleet.await_count == 4


async def test_a_calibration_asks_again_if_no_router_answers() -> None:
    router = Mock()
    router.model = AsyncMock(return_value=inference_pb2.GetModelResponse(context_length=4096))
    router.fleet = AsyncMock(side_effect=[AWAY, cluster_pb2.GetFleetResponse()])
    plan = LoadPlan(longest_prompt=256, output_tokens=16, largest_batch=4, num_checked=40, seed=0, timeout_s=60.0)
    with pytest.raises(ConfigError, match="no decode worker serves"):
        await calibrate(connection_to(router), plan, "never")


# ---- a router over the wire


class Router(RemoteRouter):
    def __init__(self) -> None:
        super().__init__("127.0.0.1:9", Credentials())
        self.num_asked = 0

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata
    ) -> inference_pb2.DetokenizeResponse:
        self.num_asked += 1
        assert not request.token_ids
        assert all(name == "authorization" for name, _ in metadata)
        if any(value.endswith("bad") for _, value in metadata) or len(metadata) != 1:
            raise Unauthenticated("not known here")
        return inference_pb2.DetokenizeResponse()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_clients_of_the_gateway_learn_no_address_of_a_router(code: grpc.StatusCode, streaming: bool) -> None:
    none = grpc.aio.Metadata()
    for details in ("ipv4:10.0.0.7:50051: Connection refused", "ipv4:10.0.0.7:50051: Socket closed"):
        failed = call_failed(grpc.aio.AioRpcError(code, none, none, details, None), "10.0.0.7:50051", 20.0, streaming)
        assert "10.0.0.7" in str(failed)
        assert str(tandem_error(failed)) == str(failed).replace(" at 10.0.0.7:50051", "").removesuffix(f": {details}")


async def test_a_key_is_asked_about_once_however_it_is_spelled() -> None:
    router = Router()
    for spelling in ("Bearer good", "bearer good", "BEARER   good", "Bearer good "):
        await router.authorize([("authorization", spelling), ("traceparent", "00")])
    assert (router.num_asked, len(router._authorized_at)) == (1, 1)


async def test_a_refused_key_opens_nothing_and_is_asked_about_again() -> None:
    router, good = Router(), ("authorization", "Bearer good")
    await router.authorize([good])
    for refused in ([("authorization", "Bearer bad")], [good, good], []):
        for _ in range(2):
            with pytest.raises(Unauthenticated):
                await router.authorize(refused)
    assert router.num_asked == 7
