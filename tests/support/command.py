"""The `tandem` command in a separate process, as a user runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import psutil

PATIENCE_S = 120.0
STOPPED_WITHIN_S = 30.0


async def start(*arguments: str, environment: Mapping[str, str] | None = None) -> Process:
    """Start `tandem` in a new session, so that a signal reaches no other process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", *arguments,
        stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
        env=os.environ | {"COLUMNS": "120"} | dict(environment or {}),
    )  # fmt: skip


async def tandem(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command to its end. Returns (exit code, stdout, stderr)."""
    process = await start(*arguments)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode()


@dataclass(frozen=True, slots=True)
class Served:
    process: Process
    address: str
    family: list[psutil.Process]  # all descendants, Ray's processes included

    async def ended(self) -> tuple[int, list[psutil.Process]]:
        """Wait for the end of `tandem serve`. Returns (exit code, processes that are left)."""
        code, left, _ = await self.ended_saying()
        return code, left

    async def ended_saying(self) -> tuple[int, list[psutil.Process], str]:
        """As `ended`, with the text of standard error."""
        async with asyncio.timeout(STOPPED_WITHIN_S):
            _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, await self.left(), err.decode()

    async def left(self) -> list[psutil.Process]:
        """Descendants that do not end in time."""
        _, left = await asyncio.to_thread(psutil.wait_procs, self.family, STOPPED_WITHIN_S)
        return left


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[Served]:
    """`tandem serve`, as soon as it serves. Its processes end with this context, also when the test fails."""
    process = await start("serve", "--model", "fake:tiny", "--port", "0", *arguments)
    try:
        yield Served(process, await _address(process), psutil.Process(process.pid).children(recursive=True))
    finally:
        if process.returncode is None:
            process.kill()  # Ray and all processes in it end, too
        await process.communicate()


async def _address(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            if line.startswith("serving"):
                return line.split(" at ")[1].split()[0]
    _, err = await process.communicate()
    raise AssertionError(f"`tandem serve` did not start: {err.decode()}")
