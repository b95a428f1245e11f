"""Three machines with a network between them (namespaces): the systemd units, a Ray cluster, `tandem serve`, real
requests, and KV over UCX on TCP. What a bad link does to a hand-off is in tests/faults/test_links.py."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.command import running
from tests.support.faults import Stream, prompt_of
from tests.support.namespaces import CONTROL_IP, DATA, Machines, why_not
from tests.support.ray_cluster import ray_environment
from tests.support.units import Unit

ROOT = Path(__file__).parents[2]
HEAD = f"{CONTROL_IP['router']}:6379"

pytestmark = [
    pytest.mark.slow,  # `make test` shows the machines in test_two_nodes.py, and the network in test_links.py
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there"),
]


def on(machines: Machines, machine: str, *command: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", machines.namespace(machine), *command)


@pytest.mark.timeout(300)
async def test_a_ray_cluster_across_machines_hands_kv_over_their_data_link() -> None:
    kv = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DATA}

    def of(machine: str) -> dict[str, str]:
        return environment | {"COLUMNS": "120"} | (kv if machine != "router" else {})

    def joining(machines: Machines, machine: str, unit: Unit) -> AbstractAsyncContextManager[str]:
        command = unit.command(HEAD=HEAD, PLACES="1", RAY_OPTIONS=f"--node-ip-address {CONTROL_IP[machine]}")
        joined: Any = {"wanted": "will now block", "cwd": ROOT, "environment": unit.environment | of(machine)}
        return running(*on(machines, machine, *command), **joined)

    serve = [sys.executable, "-m", "cli.main", "serve", "--address", HEAD, "--model", "fake:tiny"]
    serve += ["--local-prefill", "never"]
    with ray_environment() as environment, Machines.made() as machines:
        async with (
            joining(machines, "router", Unit.read("tandem-head.service")),
            joining(machines, "prefill", Unit.read("tandem-worker@.service", "prefill")),
            joining(machines, "decode", Unit.read("tandem-worker@.service", "decode")),
            running(*on(machines, "router", *serve), wanted="serving", environment=of("router"), cwd=ROOT) as line,
            machines.reachable() as reach,
        ):
            address = line.split(" at ")[1].split()[0]
            assert address.startswith(CONTROL_IP["router"]), "the router is found by the other machines"
            async with grpc.aio.insecure_channel(await reach(address)) as channel:
                inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
                before = machines.num_bytes_arrived()
                streams = [Stream(inference, prompt_of(n, 100 + 40 * n), 20, timeout_s=60.0) for n in range(4)]
                await asyncio.gather(*(stream.right() for stream in streams))
                moved = 0
                for stream in streams:
                    assert stream.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
                    moved += stream.finished.transferred_bytes
                assert moved > 0
                assert machines.num_bytes_arrived() - before > moved, "KV took another way"
