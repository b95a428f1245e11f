"""The deploy scripts make one cluster of three machines (loopback addresses here); each pool lands on its own kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.fake_services import Journal
from tests.support.ports import kept_port

ROOT = Path(__file__).parents[2]
HEAD_IP, PREFILL_IP, DECODE_IP = "127.0.1.1", "127.0.1.2", "127.0.1.3"
PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def machine(script: str, *arguments: str, environment: dict[str, str]) -> AsyncIterator[None]:
    """Run a script until its machine has joined; end it and everything below it afterwards."""
    process = await asyncio.create_subprocess_exec(
        "bash", str(ROOT / "deploy" / script), *arguments, env=environment, stdout=PIPE, stderr=STDOUT, limit=1 << 20
    )
    try:
        await wait_for_line(process, "will now block")
        yield
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 10)
        for straggler in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()


async def wait_for_line(process: Process, wanted: str) -> None:
    assert process.stdout is not None
    seen = []
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            seen.append(line)
            if wanted in line:
                return
    raise AssertionError(f"it ended without saying {wanted!r}: {''.join(seen[-5:])}")


@pytest.fixture
def head_port() -> Iterator[int]:
    with kept_port(HEAD_IP) as port:
        yield port


@pytest.mark.timeout(240)
async def test_each_pool_lands_on_its_own_machine_and_dies_with_the_driver(tmp_path: Path, head_port: int) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token", "PATH": path}
    head = f"{HEAD_IP}:{head_port}"
    # One after the other: on one real machine two starts at the same time fight for socket names.
    async with (
        machine("head.sh", environment=environment | {"NODE_IP": HEAD_IP, "PORT": str(head_port)}),
        machine("prefill.sh", head, environment=environment | {"NODE_IP": PREFILL_IP}),
        machine("decode.sh", head, environment=environment | {"NODE_IP": DECODE_IP}),
        Journal.open(tmp_path / "journal") as journal,
    ):
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.fleet_driver", str(tmp_path / "journal"), head,
            env=environment, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip
        try:
            await wait_for_line(driver, "ready")
            started = {name: await journal.start_of(name) for name in ("router-0", "prefill-0", "decode-0")}
        finally:
            services = [psutil.Process(pid) for pid in journal.pids if psutil.pid_exists(pid)]
            driver.send_signal(signal.SIGKILL)
            await driver.communicate()
        hosts = {name: start["host"] for name, start in started.items()}
        assert hosts == {"router-0": HEAD_IP, "prefill-0": PREFILL_IP, "decode-0": DECODE_IP}
        assert {start["niceness"] for start in started.values()} == {os.nice(0)}, "a service loses to other programs"
        assert len(services) == 3
        _, left = await asyncio.to_thread(psutil.wait_procs, services, 10)
        assert left == [], "what a driver started ends with it, also on other machines"
