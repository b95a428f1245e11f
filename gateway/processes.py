"""Starts the gateway processes, replaces those that die, and stops them.

All processes listen on one port (runtime/shared_port.py). A process ends when this one ends, also after `kill -9`,
because its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from prometheus_client.multiprocess import mark_process_dead

from core.errors import ConfigError, TandemError
from core.service import join_address
from gateway.metrics import SHARED_DIR
from gateway.program import pack_spec
from gateway.server import GatewaySpec
from runtime.shared_port import PortClaim

START_TIMEOUT_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a restart; doubled after each short life
SHORT_LIFE_S = 60.0
STOP_GRACE_S = 3.0  # beyond the drain

PrintLine = Callable[[str], None]


@contextlib.asynccontextmanager
async def gateway(spec: GatewaySpec, print_line: PrintLine) -> AsyncIterator[str]:
    """Gateway processes that serve. Yields their URL. Raises `TandemError` if they do not start."""
    host = spec.config.host
    try:
        claim = PortClaim(host, spec.config.port)
    except OSError as error:
        address = join_address(host, spec.config.port)
        raise ConfigError(f"cannot listen on {address} ({error.strerror}); choose another port with --http") from error
    with contextlib.closing(claim), tempfile.TemporaryDirectory(prefix="tandem-gateway-") as directory:
        spec = replace(spec, config=replace(spec.config, port=claim.port))
        children = [GatewayProcess(spec, directory, print_line) for _ in range(spec.config.num_processes)]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                away = [await started for started in asyncio.as_completed([child.start() for child in children])]
            for fault in dict.fromkeys(fault for faults in away for fault in faults):
                print_line(f"the gateway answers 503 until its router answers: {fault}")
            for child in children:
                child.watch()
            yield url_of(spec)
        except TimeoutError:
            raise TandemError(f"a gateway process does not serve after {START_TIMEOUT_S:g} s") from None
        finally:
            await asyncio.gather(*(child.stop() for child in children))


def url_of(spec: GatewaySpec) -> str:
    scheme = "https" if spec.config.tls_cert else "http"
    return f"{scheme}://{join_address(spec.config.host, spec.config.port)}"


class GatewayProcess:
    """One process, and its successors."""

    def __init__(self, spec: GatewaySpec, directory: str, print_line: PrintLine) -> None:
        self._spec, self._directory, self._print_line = spec, directory, print_line
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> list[str]:
        """Start the process and wait until it accepts connections. Returns the faults of routers that do not answer.

        Raises `TandemError` if the process ends before.
        """
        environment = dict(os.environ)
        environment.pop(SHARED_DIR, None)
        if self._spec.config.num_processes > 1:
            environment[SHARED_DIR] = self._directory
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.program", stdin=pipe, stdout=pipe, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # of a process that ends at once; the missing line says so
            process.stdin.write(pack_spec(self._spec))
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise TandemError(f"a gateway process ended with status {await process.wait()} before it served")
        away: list[str] = json.loads(line)["away"]
        return away

    def watch(self) -> None:
        self._watching = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            assert self._process is not None
            started_at = time.monotonic()
            status = await self._process.wait()
            self._forget_gauges()
            if time.monotonic() - started_at > SHORT_LIFE_S:
                pause_s = FIRST_PAUSE_S
            self._print_line(f"a gateway process ended with status {status}; a new one starts in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(TandemError, TimeoutError):  # ended again; the loop waits longer
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self.start()

    def _forget_gauges(self) -> None:
        if self._process is not None and self._spec.config.num_processes > 1:
            mark_process_dead(self._process.pid, self._directory)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Let open answers end, and kill the process after the drain."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._spec.drain_timeout_s + STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.stdin is not None:
            process.stdin.close()
