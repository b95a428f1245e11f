"""Machines of a Ray cluster on loopback addresses, from the systemd units, and a fleet of fake services in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from core.lifecycle import ServiceRole
from tests.support.command import line_with, running
from tests.support.units import Unit

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """Variables of the programs of one Ray cluster: its token, its files apart from those of other users, and `ray` on
    the path."""
    # Not in the folder of a test: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
        yield os.environ | own | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "PATH": path}


def machine(
    unit: Unit, environment: dict[str, str], ip: str, options: str = "", **variables: str
) -> AbstractAsyncContextManager[str]:
    """Run the command of a unit until its machine has joined; `options` are of `ray start`, without blanks in each."""
    command = unit.command(RAY_OPTIONS=f"--node-ip-address {ip} {options}", **variables)
    return running(*command, wanted="will now block", environment=unit.environment | environment, cwd=ROOT)


@dataclass(frozen=True, slots=True)
class RayCluster:
    head: str  # host:port
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Driver:
    """A process of `tests.integration.fleet_driver`."""

    process: asyncio.subprocess.Process

    async def scale(self, role: ServiceRole, size: int) -> list[str]:
        """Returns the pinned pools."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{role.value} {size}\n".encode())
        await self.process.stdin.drain()
        return (await line_with(self.process, "pinned:")).split()[1:]


@contextlib.asynccontextmanager
async def driver(cluster: RayCluster, journal: Path, *arguments: str, **variables: str) -> AsyncIterator[Driver]:
    """A fleet of fake services in this cluster, as soon as it is ready; ended by SIGKILL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.fleet_driver", str(journal), cluster.head, *arguments,
        env=cluster.environment | variables, stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
    )  # fmt: skip
    try:
        await line_with(process, "ready")
        yield Driver(process)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.communicate()
