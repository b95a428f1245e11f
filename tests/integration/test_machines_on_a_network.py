"""Three machines with a network between them (namespaces): the deploy scripts, a Ray cluster, `tandem serve`, real
requests, and KV over UCX on TCP. What a bad link does to a hand-off is in tests/faults/test_links.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc.aio
import psutil
import pytest

from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.faults import Stream, prompt_of
from tests.support.namespaces import CONTROL_IP, DATA, Machines, why_not

ROOT = Path(__file__).parents[2]
HEAD = f"{CONTROL_IP['router']}:6379"
PATIENCE_S = 90.0

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there")


@contextlib.asynccontextmanager
async def running(
    machines: Machines, machine: str, command: list[str], ready: str, environment: Mapping[str, str]
) -> AsyncIterator[str]:
    """A command on a machine. Gives its first line with `ready` in it; ends it and its family afterwards."""
    process = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", machines.namespace(machine), *command,
        cwd=ROOT, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, limit=1 << 20,
    )  # fmt: skip
    try:
        yield await line_with(process, ready)
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 10)
        for straggler in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()


async def line_with(process: Process, wanted: str) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            seen.append(line)
            if wanted in line:
                return line
    raise AssertionError(f"it ended without saying {wanted!r}: {''.join(seen[-8:])}")


@pytest.mark.timeout(300)
async def test_a_ray_cluster_across_machines_hands_kv_over_their_data_link(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    environment = os.environ | {
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_MODE": "token",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "120",
    }
    kv = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DATA}

    def of(machine: str) -> dict[str, str]:
        return environment | (kv if machine != "router" else {}) | {"NODE_IP": CONTROL_IP[machine]}

    serve = [sys.executable, "-m", "cli.main", "serve", "--address", HEAD, "--model", "fake:tiny"]
    serve += ["--local-prefill", "never"]
    with Machines.made() as machines:
        async with (
            running(machines, "router", ["bash", "deploy/head.sh"], "will now block", of("router")),
            running(machines, "prefill", ["bash", "deploy/prefill.sh", HEAD], "will now block", of("prefill")),
            running(machines, "decode", ["bash", "deploy/decode.sh", HEAD], "will now block", of("decode")),
            running(machines, "router", serve, "serving", of("router")) as line,
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
                    assert stream.answer.finished is not None
                    assert stream.answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
                    moved += stream.answer.finished.transferred_bytes
                assert moved > 0
                assert machines.num_bytes_arrived() - before > moved, "KV took another way"
